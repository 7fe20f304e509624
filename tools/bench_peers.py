"""The data plane's workloads against other gateways and ours, side by side: all are up at once, and take turns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tools.bench_data_plane_run import (
    GATEWAY,
    WARM_UP,
    Plan,
    drive,
    fabric_config,
    fabric_pids,
    figures_of,
    pace_of,
    report_of,
)
from tools.bench_data_plane_workloads import Workload
from tools.child import bound_command
from tools.child_fabric import child_fabric
from tools.failures import CommandError
from tools.peers import mock_worker
from tools.peers.dynamo import DYNAMO
from tools.peers.litellm import LITELLM
from tools.peers.nginx import NGINX
from tools.peers.peer import Peer, Site
from tools.peers.sglang_router import SGLANG_ROUTER
from tools.peers.smg import SMG
from tools.peers.vllm_router import VLLM_ROUTER, VLLM_ROUTER_ROUND_ROBIN

PEERS: Final = {
    peer.name: peer for peer in (NGINX, SGLANG_ROUTER, SMG, VLLM_ROUTER, VLLM_ROUTER_ROUND_ROBIN, DYNAMO, LITELLM)
}
KVLOOM: Final = "kvloom"
KVLOOM_COLOCATED: Final = "kvloom --colocate"
_NUM_WORKERS: Final = 2
_INSTALL_TIMEOUT_SECONDS: Final = 900.0
_STOP_TIMEOUT_SECONDS: Final = 8.0
_PROBE_TIMEOUT_SECONDS: Final = 5.0
_LOG_TAIL_BYTES: Final = 400
_SETTLE_SECONDS: Final = 1.0
"""Between two measurements: what the last one left behind is done with."""


class PeerError(Exception):
    """A peer cannot be measured; the message says why."""


class System(msgspec.Struct, frozen=True):
    """One contender that is up."""

    name: str
    url: str
    pids: Callable[[], dict[str, list[int]]]
    max_share: float = 1.0


def run_with_peers(
    plan: Plan, peers: Sequence[Peer], cache_dir: Path, on_progress: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(reports, with a field `system` each; why peers are missing). Raises CommandError when ours fails."""
    return asyncio.run(_run(plan, peers, cache_dir, on_progress))


async def _run(
    plan: Plan, peers: Sequence[Peer], cache_dir: Path, on_progress: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    missing: dict[str, str] = {}
    installed: list[tuple[Peer, Path]] = []
    for peer in peers:
        try:
            installed.append((peer, await _install(peer, cache_dir, on_progress)))
        except PeerError as error:
            missing[peer.name] = str(error)
    reports: list[dict[str, Any]] = []
    for pace in dict.fromkeys(map(pace_of, plan.workloads)):
        workloads = [workload for workload in plan.workloads if pace_of(workload) == pace]
        async with contextlib.AsyncExitStack() as stack:
            systems = await _start_all(plan, workloads[0], installed, stack, missing, on_progress)
            reports += await _measure(plan, workloads, systems, missing, on_progress)
    return reports, missing


async def _start_all(
    plan: Plan,
    workload: Workload,
    installed: Sequence[tuple[Peer, Path]],
    stack: contextlib.AsyncExitStack,
    missing: dict[str, str],
    on_progress: Callable[[str], None],
) -> list[System]:
    systems: list[System] = []
    work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvloom-peers-")))
    for name, colocate in ((KVLOOM, False), (KVLOOM_COLOCATED, True)):
        on_progress(f"starting {name}")
        data_dir = work_dir / f"kvloom-{colocate:d}"
        data_dir.mkdir()
        layout = msgspec.structs.replace(plan.layout, colocate=colocate)
        config = fabric_config(msgspec.structs.replace(plan, layout=layout), workload, data_dir)
        url = await stack.enter_async_context(child_fabric(config, data_dir))
        systems.append(System(name, url, lambda data_dir=data_dir: fabric_pids(data_dir)))
    workers = [await stack.enter_async_context(_worker(plan, workload)) for _ in range(_NUM_WORKERS)]
    for peer, bin_dir in installed:
        if peer.name in missing:
            continue
        on_progress(f"starting {peer.name}")
        own_dir = work_dir / peer.name
        own_dir.mkdir()
        site = Site(bin_dir, own_dir, _free_port(), _free_port(), workers, plan.model.name)
        try:
            systems.append(await stack.enter_async_context(_gateway(peer, site)))
        except PeerError as error:
            missing[peer.name] = str(error)
    return systems


async def _measure(
    plan: Plan,
    workloads: Sequence[Workload],
    systems: Sequence[System],
    missing: dict[str, str],
    on_progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for system in systems:
        for warm_up in WARM_UP if workloads[0].decode_every == 1 else WARM_UP[:1]:
            await drive(plan, warm_up.scaled(system.max_share), system.url, system.pids(), seed=0)
    for run in range(plan.num_runs):
        for workload in workloads:
            for system in systems:
                on_progress(f"{workload.name}, run {run + 1} of {plan.num_runs}: {system.name}")
                own = workload.scaled(system.max_share)
                try:
                    raw = await drive(plan, own, system.url, system.pids(), seed=1 + run)
                except CommandError as error:
                    if system.name.startswith(KVLOOM):
                        raise
                    missing[f"{system.name}, {workload.name}"] = str(error)
                    continue
                runs.setdefault((workload.name, system.name), []).append(figures_of(own, raw))
                await asyncio.sleep(_SETTLE_SECONDS)
    return [
        {"system": system.name, **report_of(workload, runs[workload.name, system.name], plan)}
        for workload in workloads
        for system in systems
        if (workload.name, system.name) in runs
    ]


async def _install(peer: Peer, cache_dir: Path, on_progress: Callable[[str], None]) -> Path:
    """The folder with its programs. Raises PeerError."""
    if not peer.requirement:
        found = shutil.which(peer.program)
        if found is None:
            raise PeerError(f"{peer.program} is not installed on this system")
        return Path(found).parent
    package = peer.requirement.partition("==")[0].partition("[")[0]
    home = cache_dir / package
    marker = home / "requirement"
    if marker.is_file() and marker.read_text() == peer.requirement:
        return home / "bin"
    on_progress(f"installing {peer.requirement} into {home}")
    home.parent.mkdir(parents=True, exist_ok=True)
    for argv in (
        (sys.executable, "-m", "venv", str(home)),
        (str(home / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", peer.requirement),
    ):
        process = await asyncio.create_subprocess_exec(*bound_command(argv), stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE)
        try:
            async with asyncio.timeout(_INSTALL_TIMEOUT_SECONDS):
                _, said = await process.communicate()
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise PeerError(f"installing {peer.requirement} took too long") from error
        if process.returncode:
            raise PeerError(f"{peer.requirement} cannot be installed: {_last_line(said)}")
    marker.write_text(peer.requirement)
    return home / "bin"


@contextlib.asynccontextmanager
async def _worker(plan: Plan, workload: Workload) -> AsyncIterator[str]:
    """A mock worker's URL."""
    order = mock_worker.Order(plan.model.name, plan.model.path, workload.step_ms, workload.decode_every)
    command = bound_command((sys.executable, "-P", "-m", "tools.peers.mock_worker"))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        port = (await process.stdout.readline()).strip().decode()
        if not port:
            raise CommandError("the mock worker did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        await _stop(process)


@contextlib.asynccontextmanager
async def _gateway(peer: Peer, site: Site) -> AsyncIterator[System]:
    """Raises PeerError when it does not answer."""
    log_path = site.work_dir / "output"
    argv = list(peer.argv(site))
    argv[0] = shutil.which(argv[0]) or argv[0]
    with log_path.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *bound_command(argv),
            stdin=DEVNULL, stdout=output, stderr=output, env={**os.environ, **peer.env}, process_group=0,
        )  # fmt: skip
    url = f"http://127.0.0.1:{site.port}"
    try:
        deadline = time.monotonic() + peer.start_timeout_seconds
        while not await asyncio.to_thread(_answers, url, site.model):
            if process.returncode is not None or time.monotonic() > deadline:
                with log_path.open("rb") as output:
                    output.seek(max(0, log_path.stat().st_size - _LOG_TAIL_BYTES))
                    said = _last_line(output.read())
                raise PeerError(f"{peer.name} does not answer: {said}")
            await asyncio.sleep(0.3)
        yield System(peer.name, url, lambda: {GATEWAY: _tree(process.pid)}, peer.max_share)
    finally:
        await _stop(process)


async def _stop(process: Process) -> None:
    """With everything it started."""
    tree = _tree(process.pid)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid in tree:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_SECONDS):
                await process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for parent in found:
        try:
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (thread / "children").read_text().split()]
        except OSError:
            continue
    return found


def _answers(url: str, model: str) -> bool:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_SECONDS) as response:
            return b"[DONE]" in response.read()
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _last_line(said: bytes) -> str:
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:200]
