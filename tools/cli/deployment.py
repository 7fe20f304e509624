"""`kvloom doctor deployment`: what is wrong, or soon will be, with a running fleet, and what to do about it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
import redis.asyncio.retry
import redis.backoff
import redis.exceptions
from cryptography import x509

from kvloom.v1.shard_service_pb2 import GetInfoResponse
from kvloom_common.config import KvloomConfig
from kvloom_common.discovery.redis_client import redis_client
from tools.doctor.findings import DoctorFinding, show
from tools.fleet.members import FleetAccess
from tools.fleet.view import FleetView, with_loads
from tools.options import FabricFlags, fabric_options, option

MAX_RESTARTS: Final = 3
"""A process that its supervisor has started more often is in trouble."""
FULL_SHARE: Final = 0.95
MIN_DESCRIPTORS: Final = 8192
MIN_DISK_BYTES: Final = 2**30
MIN_DISK_SHARE: Final = 0.05
MAX_SKEW_SECONDS: Final = 1.0
"""Leases, expiries and deadlines of several machines are compared."""
SLOW_REDIS_SECONDS: Final = 0.05
EXPIRES_SOON_SECONDS: Final = 14 * 86_400.0
REDIS_SECONDS: Final = 5.0


@click.command()
@option("--json", "as_json", scope="doctor_deployment", is_flag=True, help="Print one JSON array.")
@fabric_options
def doctor_deployment(as_json: bool, fabric: FabricFlags) -> None:
    """Check a running fleet: machines and processes, models, versions, Redis, databases, disk, clocks and certificates,
    and say what to do.

    The exit status is 1 if a check fails. Warnings are what will fail, or what only you can judge.
    """
    fleet = FleetAccess.open(fabric)
    show(asyncio.run(_examine(fleet)), as_json=as_json)


async def _examine(fleet: FleetAccess) -> list[DoctorFinding]:
    """Raises CommandError if nothing runs."""
    view = await fleet.view()
    infos = await fleet.shard_infos(view)
    view = with_loads(view, infos)
    found = [*of_processes(view), *of_models(view, infos), of_versions(infos)]
    found += [*of_state(fleet.config, len(view.machines)), *of_machine(fleet.folder.data_dir)]
    found += of_certificate(fleet.config, time.time())
    if fleet.config.redis.url:
        found += await of_redis(fleet.config)
    return found


def of_processes(view: FleetView) -> Iterator[DoctorFinding]:
    """Machines that do not answer, processes that do not run or stay, and what their supervisors complain of."""
    for problem in view.problems:
        yield DoctorFinding("fleet", "failed", f"{problem}: see `kvloom status`")
    for machine in view.machines:
        state = machine.state
        if state is None:
            detail = f"it does not answer ({machine.problem}): is it up, and does the firewall let its port pass?"
            yield DoctorFinding(f"machine {machine.name}", "failed", detail)
            continue
        complaints = [*state.not_ready, *state.alarms]
        for complaint in complaints:
            yield DoctorFinding(f"machine {machine.name}", "failed", f"{complaint} (docs/operate/alerts.md)")
        for model in state.brownouts:
            yield DoctorFinding(
                f"model {model}", "warning", "its answers are degraded: add shards (docs/operate/brownout.md)"
            )
        for warning in state.warnings:
            yield DoctorFinding(f"machine {machine.name}", "warning", warning)
        if state.phase == "ready" and not complaints:
            yield DoctorFinding(f"machine {machine.name}", "ok", f"{len(state.processes)} processes")
    for process in view.processes:
        if process.state not in _RUNNING:
            detail = f"it is {process.state}: `kvloom logs {process.name}`, then `kvloom restart {process.name}`"
            yield DoctorFinding(f"process {process.name}", "failed", detail)
        elif process.restarts > MAX_RESTARTS:
            detail = (
                f"it has been started again {process.restarts} times: `kvloom logs {process.name}` says why it ends"
            )
            yield DoctorFinding(f"process {process.name}", "warning", detail)
    roles = Counter(process.role for process in view.processes)
    for role, what in (("edge", "API"), ("router", "placement"), ("safety", "safety policy")):
        if roles[role] == 1 and len(view.machines) > 1:
            detail = f"one process has the whole {what}: start --role {role} on another machine"
            yield DoctorFinding(role, "warning", detail)


_RUNNING: Final = frozenset({"ready", "draining", "drained", "asleep", "registered"})


def of_models(view: FleetView, infos: Mapping[str, GetInfoResponse | None]) -> Iterator[DoctorFinding]:
    """Models without a shard that takes requests, with one alone, and without room."""
    by_model: dict[str, list[str]] = {}
    for process in view.processes:
        if process.role == "shard":
            by_model.setdefault(process.model, []).append(process.name if process.state == "ready" else "")
    for model, names in sorted(by_model.items()):
        ready = [name for name in names if name]
        if not ready:
            detail = "no shard takes requests: `kvloom undrain`, `kvloom models wake`, or `kvloom restart shard`"
            yield DoctorFinding(f"model {model}", "failed", detail)
            continue
        full = [name for name in ready if (info := infos.get(name)) is not None and _used_share(info) > FULL_SHARE]
        if len(full) == len(ready):
            detail = (
                "the KV memory of all shards is full: add shards, or lower shard.max_batch (docs/how-to/capacity.md)"
            )
            yield DoctorFinding(f"model {model}", "warning", detail)
        elif len(ready) == 1:
            yield DoctorFinding(f"model {model}", "warning", "it has one shard: while that restarts, nothing answers")
        else:
            yield DoctorFinding(f"model {model}", "ok", f"{len(ready)} of {len(names)} shards take requests")


def _used_share(info: GetInfoResponse) -> float:
    return 1.0 - info.load.num_available_blocks / info.info.num_blocks if info.info.num_blocks else 0.0


def of_versions(infos: Mapping[str, GetInfoResponse | None]) -> DoctorFinding:
    """Neighbouring versions work together as long as an upgrade takes, and no longer than that."""
    own = importlib.metadata.version("kvloom")
    versions = sorted({info.info.version for info in infos.values() if info is not None and info.info.version} | {own})
    if len(versions) > 1:
        detail = f"{', '.join(versions)} run together: finish with `kvloom restart --rolling` (docs/operate/upgrade.md)"
        return DoctorFinding("versions", "warning", detail)
    return DoctorFinding("versions", "ok", own)


def of_state(config: KvloomConfig, num_machines: int) -> Iterator[DoctorFinding]:
    """Databases that only one machine has."""
    for name, section in (("control", config.control), ("orchestrator", config.orchestrator)):
        if not section.enabled:
            continue
        if section.database_url.startswith("postgresql"):
            yield DoctorFinding(f"{name} database", "ok", "PostgreSQL")
        elif num_machines > 1:
            detail = f"SQLite is on one machine alone: move it with `kvloom backup`, {name}.database_url and `restore`"
            yield DoctorFinding(f"{name} database", "warning", detail)
        else:
            yield DoctorFinding(f"{name} database", "ok", "SQLite, on this machine; `kvloom backup` copies it")


def of_machine(data_dir: Path) -> Iterator[DoctorFinding]:
    """Disk space and file descriptors of this machine."""
    # A machine that only looks at its fleet has no data directory yet.
    there = next(folder for folder in (data_dir, *data_dir.parents) if folder.exists())
    disk = shutil.disk_usage(there)
    detail = f"{disk.free / 2**30:.1f} GiB are free at {there}"
    if disk.free < MIN_DISK_BYTES:
        yield DoctorFinding("disk", "failed", f"{detail}: logs, usage records and databases need room (log.max_bytes)")
    elif disk.free < MIN_DISK_SHARE * disk.total:
        yield DoctorFinding("disk", "warning", f"{detail}, {disk.free / disk.total:.1%} of it: what else fills it?")
    else:
        yield DoctorFinding("disk", "ok", detail)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = max(soft, hard) if resource.RLIM_INFINITY not in (soft, hard) else MIN_DESCRIPTORS
    if allowed < MIN_DESCRIPTORS:
        detail = f"{allowed} files may be open, which are as many clients: raise it (ulimit -n, LimitNOFILE)"
        yield DoctorFinding("file descriptors", "warning", detail)
    else:
        yield DoctorFinding("file descriptors", "ok", "enough")


def of_certificate(config: KvloomConfig, now: float) -> Iterator[DoctorFinding]:
    """The certificate that clients see. `now` is in Unix seconds."""
    if not config.tls.certificate_file:
        return
    name = "TLS certificate"
    try:
        [certificate, *_] = x509.load_pem_x509_certificates(Path(config.tls.certificate_file).read_bytes())
    except (OSError, ValueError) as error:
        yield DoctorFinding(name, "failed", f"{config.tls.certificate_file} cannot be read: {error}")
        return
    ends_at = certificate.not_valid_after_utc
    left_seconds = (ends_at - datetime.fromtimestamp(now, UTC)).total_seconds()
    detail = f"{config.tls.certificate_file} is valid until {ends_at:%Y-%m-%d}"
    if left_seconds <= 0:
        yield DoctorFinding(name, "failed", f"{detail}, which is over: replace the file, it is read again by itself")
    elif left_seconds < EXPIRES_SOON_SECONDS:
        yield DoctorFinding(name, "warning", f"{detail}: renew it, the file is read again by itself")
    else:
        yield DoctorFinding(name, "ok", detail)


async def of_redis(config: KvloomConfig) -> list[DoctorFinding]:
    """An answer that comes soon, memory that keeps what it is given, and the same time."""
    retry = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)
    client = redis_client(config.redis.url, timeout_seconds=REDIS_SECONDS, retry=retry)
    try:
        begin = time.perf_counter()
        seconds, micros = await client.time()
        elapsed, skew_seconds = time.perf_counter() - begin, seconds + micros / 1e6 - time.time()
        memory: Mapping[str, Any] = {}
        with contextlib.suppress(redis.exceptions.NoPermissionError):  # the embedded one answers to few commands
            memory = await client.info("memory")
    except (redis.exceptions.RedisError, OSError) as error:
        detail = f"it does not answer ({error or type(error).__name__}): connected processes go on, and none can join"
        return [DoctorFinding("Redis", "failed", detail)]
    finally:
        await client.aclose()
    return [*(of_redis_memory(memory) if memory else ()), *_of_redis_time(elapsed, skew_seconds)]


def of_redis_memory(memory: Mapping[str, Any]) -> Iterator[DoctorFinding]:
    """`memory` is what Redis says in INFO."""
    policy, most, used = (
        str(memory.get("maxmemory_policy", "")),
        memory.get("maxmemory", 0),
        memory.get("used_memory", 0),
    )
    if most and policy.startswith("allkeys"):
        detail = f"maxmemory-policy {policy} may drop records of processes: set noeviction"
        yield DoctorFinding("Redis memory", "failed", detail)
    elif most and used > FULL_SHARE * most:
        yield DoctorFinding("Redis memory", "failed", f"{used:,} of {most:,} bytes are used: raise maxmemory")
    else:
        yield DoctorFinding("Redis memory", "ok", f"{used:,} bytes")


def _of_redis_time(elapsed: float, skew_seconds: float) -> Iterator[DoctorFinding]:
    if elapsed > SLOW_REDIS_SECONDS:
        detail = f"it takes {elapsed * 1e3:.0f} ms to answer: limits are leased there; put it nearer"
        yield DoctorFinding("Redis", "warning", detail)
    else:
        yield DoctorFinding("Redis", "ok", f"it answers in {elapsed * 1e3:.1f} ms")
    if abs(skew_seconds) > MAX_SKEW_SECONDS + elapsed:
        detail = f"this machine's differs by {skew_seconds:+.1f} s from that of Redis: run NTP on both"
        yield DoctorFinding("clocks", "failed", detail)
    else:
        yield DoctorFinding("clocks", "ok", "this machine's is that of Redis")
