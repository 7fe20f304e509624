"""`kvloom doctor security`: attacks a running fabric in harmless ways, and reports what gets through."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import click
import grpc
import msgspec
import redis.asyncio
import redis.exceptions
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloom_common.access.exposure import authenticates, is_loopback
from kvloom_common.config import KvloomConfig
from kvloom_common.process.data_dir import open_to_others
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from tools.fabric_trust import trust_of
from tools.options import choose_data_dir, config_option, data_dir_option, load_config_file, option
from tools.supervisor.readiness import reachable_address
from tools.supervisor.state import FabricState, RunFolder
from tools.supervisor.tenant_tables import not_following

_TIMEOUT_SECONDS: Final = 5.0
_LOOPBACK: Final = ("127.", "localhost", "[::1]", "::1", "unix:")
_SIGNS: Final = {"ok": "✓", "warning": "!", "failed": "✗"}
_MAX_FILES: Final = 20
"""More are counted, not listed."""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    name: str
    outcome: Literal["ok", "warning", "failed"]
    detail: str


@click.command()
@option("--json", "as_json", scope="doctor_security", is_flag=True, help="Print one JSON array.")
@data_dir_option
@config_option
def doctor_security(as_json: bool, data_dir: Path | None, config_file: Path | None) -> None:
    """Check a running fabric: its files, its secret, its Redis, and whether ports inside it refuse strangers.

    The exit status is 1 if a check fails. Warnings are what only you can judge.
    """
    folder = RunFolder(choose_data_dir(data_dir, load_config_file(config_file)))
    state = folder.require_running()
    config = load_config_file(folder.config_path)
    findings = asyncio.run(_examine(folder, config, state, trust_of(config)))
    if as_json:
        print(msgspec.json.encode(findings).decode())
    else:
        for finding in findings:
            print(f"{_SIGNS[finding.outcome]} {finding.name}: {finding.detail}")
    if any(finding.outcome == "failed" for finding in findings):
        sys.exit(1)


async def _examine(folder: RunFolder, config: KvloomConfig, state: FabricState, trust: FabricTrust) -> list[Finding]:
    found = [*_files(folder), _secret(config, trust), *_listeners(config, state), _callers(config)]
    if config.control.enabled:
        found += _tenant_tables(folder, state)
    found.append(await _redis(config))
    found += [finding async for finding in _ports(state, trust)]
    found += [finding async for finding in _metrics(config, state)]
    return found


def _files(folder: RunFolder) -> Iterator[Finding]:
    found = open_to_others(folder.data_dir)
    for path in found[:_MAX_FILES]:
        yield Finding(f"file {path}", "failed", f"other users have rights to it: chmod go= {path}")
    if len(found) > _MAX_FILES:
        more = f"{len(found) - _MAX_FILES} more are open to other users: chmod -R go= {folder.data_dir}"
        yield Finding("files", "failed", more)
    if not found:
        yield Finding(f"files in {folder.data_dir}", "ok", "only this user has rights to them")


def _secret(config: KvloomConfig, trust: FabricTrust) -> Finding:
    if not trust.has_secret:
        return Finding("secret", "failed", "there is none: any process can join the fabric")
    if config.fabric.secret_file:
        return Finding("secret", "ok", f"in {config.fabric.secret_file}")
    return Finding("secret", "ok", "from the environment; it cannot be rotated without restarts")


def _listeners(config: KvloomConfig, state: FabricState) -> Iterator[Finding]:
    addresses = {"HTTP": state.http_url.partition("://")[2], "gRPC": state.router_address}
    hosts = {"HTTP": config.edge.host, "gRPC": config.router.host, "metrics": config.metrics.host}
    addresses["metrics"] = config.metrics.host
    keys = f"the auth provider {config.callers.provider}" if config.callers.provider else "API keys"
    for name, address in addresses.items():
        if not address:  # other machines of the fleet have them
            continue
        host = hosts[name]
        if is_loopback(host):
            yield Finding(f"{name} listener", "ok", f"{address} is reachable from this machine only")
        elif config.tls.certificate_file and authenticates(config):
            yield Finding(f"{name} listener", "ok", f"{host} is reachable from other machines, with TLS and {keys}")
        else:
            missing = " and ".join(
                what
                for what, is_there in (("TLS", config.tls.certificate_file), ("API keys", authenticates(config)))
                if not is_there
            )
            detail = f"{host} is reachable from other machines without {missing} (kvloom up --help)"
            yield Finding(f"{name} listener", "warning", detail)


def _callers(config: KvloomConfig) -> Finding:
    if config.callers.anonymous == "shared":
        return Finding("callers", "warning", "anonymous callers share cached prompts (callers.anonymous)")
    return Finding("callers", "ok", "callers are isolated by credential or address")


def _tenant_tables(folder: RunFolder, state: FabricState) -> list[Finding]:
    """A process that does not follow the table of tenants serves keys that are revoked."""
    behind = not_following(folder.data_dir, state.processes, time.time())
    name = "tables of tenants"
    return [Finding(name, "failed", one) for one in behind] or [Finding(name, "ok", "all processes follow control's")]


async def _redis(config: KvloomConfig) -> Finding:
    """Tries to enter without the password."""
    parts = urlsplit(config.redis.url)
    place = f"{parts.hostname or 'localhost'}:{parts.port or 6379}" if parts.scheme != "unix" else parts.path
    without = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    client = redis.asyncio.Redis.from_url(
        without, socket_timeout=_TIMEOUT_SECONDS, socket_connect_timeout=_TIMEOUT_SECONDS
    )
    try:
        await client.execute_command("PING")
    except (redis.exceptions.RedisError, OSError):
        plain = parts.scheme == "redis" and not place.startswith(_LOOPBACK)
        if plain:
            return Finding("Redis", "warning", f"{place} wants a password, which is sent without TLS: use rediss://")
        return Finding("Redis", "ok", f"{place} refuses strangers")
    finally:
        await client.aclose()
    return Finding("Redis", "failed", f"{place} needs no password: anyone who reaches it can stop the fabric")


async def _ports(state: FabricState, trust: FabricTrust) -> AsyncIterator[Finding]:
    """Tries the ports inside the fabric as a stranger, and as a member."""
    for process in state.processes:
        address = process.internal_address if process.router_address else process.address
        if process.role not in ("shard", "safety", "control", "router") and not process.router_address:
            continue
        if not address:
            yield Finding(f"{process.name} port", "failed", "it does not ask for the fabric's secret")
            continue
        role = "router" if process.router_address else process.role
        if await _answers(NO_SECRET, address, role):
            yield Finding(f"{process.name} port", "failed", f"{address} serves strangers")
        elif not await _answers(trust, address, role):
            yield Finding(f"{process.name} port", "failed", f"{address} does not serve its own fabric either")
        else:
            yield Finding(f"{process.name} port", "ok", f"{address} serves only its fabric")


async def _metrics(config: KvloomConfig, state: FabricState) -> AsyncIterator[Finding]:
    """Scrapes every process without a key, and without TLS."""
    for process in state.processes:
        for address in filter(None, (process.metrics_address, process.router_metrics_address)):
            name = f"{process.name} metrics"
            if await _scrapes(reachable_address(address)):
                needed = authenticates(config) or config.tls.certificate_file
                detail = f"{address} serves strangers who reach it"
                yield Finding(name, "failed" if needed else "ok", detail + ("" if needed else ", like the API"))
            else:
                yield Finding(name, "ok", f"{address} refuses strangers")


async def _scrapes(address: str) -> bool:
    """Whether /metrics answers with 200."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return False
    return status_line.split(b" ")[1:2] == [b"200"]


async def _answers(trust: FabricTrust, address: str, role: str) -> bool:
    """Whether any answer comes, even an error of the method."""
    async with trust.open_channel(address, role) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True
