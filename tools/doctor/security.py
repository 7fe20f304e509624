"""`kvloom doctor security`: attacks a running fabric in harmless ways, and reports what gets through."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloom_common.access.exposure import authenticates, authenticates_scrapers, is_loopback
from kvloom_common.addresses import join_address, split_address, url_host
from kvloom_common.config import KvloomConfig
from kvloom_common.process.data_dir import open_to_others
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from tools.doctor.findings import DoctorFinding, Outcome, show
from tools.fabric_trust import trust_of
from tools.options import FabricFlags, fabric_options, load_config_file, option
from tools.supervisor.readiness import reachable_address
from tools.supervisor.state import FabricState, RunFolder
from tools.supervisor.tenant_tables import not_following

_TIMEOUT_SECONDS: Final = 5.0
_LOOPBACK: Final = ("127.", "localhost", "[::1]", "::1", "unix:")
_MAX_FILES: Final = 20
"""More are counted, not listed."""


@click.command()
@option("--json", "as_json", scope="doctor_security", is_flag=True, help="Print one JSON array.")
@fabric_options
def doctor_security(as_json: bool, fabric: FabricFlags) -> None:
    """Check a running fabric: its files, its secret, its Redis, and whether ports inside it refuse strangers.

    The exit status is 1 if a check fails, or cannot tell. Warnings are what only you can judge.
    """
    folder = RunFolder(fabric.home())
    state = folder.require_running()
    config = load_config_file(folder.config_path)
    findings = asyncio.run(_examine(folder, config, state, trust_of(config)))
    show(findings, as_json=as_json)


async def _examine(
    folder: RunFolder, config: KvloomConfig, state: FabricState, trust: FabricTrust
) -> list[DoctorFinding]:
    found = [*_files(folder), _secret(config, trust), *_listeners(config, state), _callers(config)]
    if config.control.enabled:
        found += _tenant_tables(folder, state)
    found.append(await _redis(config))
    found += [finding async for finding in _ports(state, trust)]
    found += [finding async for finding in client_ports(config, state)]
    return found


def _files(folder: RunFolder) -> Iterator[DoctorFinding]:
    found = open_to_others(folder.data_dir)
    for path in found[:_MAX_FILES]:
        yield DoctorFinding(f"file {path}", "failed", f"other users have rights to it: chmod go= {path}")
    if len(found) > _MAX_FILES:
        more = f"{len(found) - _MAX_FILES} more are open to other users: chmod -R go= {folder.data_dir}"
        yield DoctorFinding("files", "failed", more)
    if not found:
        yield DoctorFinding(f"files in {folder.data_dir}", "ok", "only this user has rights to them")


def _secret(config: KvloomConfig, trust: FabricTrust) -> DoctorFinding:
    if not trust.has_secret:
        return DoctorFinding("secret", "failed", "there is none: any process can join the fabric")
    if config.fabric.secret_file:
        return DoctorFinding("secret", "ok", f"in {config.fabric.secret_file}")
    return DoctorFinding("secret", "ok", "from the environment; it cannot be rotated without restarts")


def _listeners(config: KvloomConfig, state: FabricState) -> Iterator[DoctorFinding]:
    addresses = {"HTTP": state.http_url.partition("://")[2], "gRPC": state.router_address}
    hosts = {"HTTP": config.edge.host, "gRPC": config.router.host, "metrics": config.metrics.host}
    addresses["metrics"] = config.metrics.host
    is_for_known = {"HTTP": authenticates(config), "gRPC": authenticates(config)}
    is_for_known["metrics"] = authenticates_scrapers(config)
    keys = f"the auth provider {config.callers.provider}" if config.callers.provider else "API keys"
    for name, address in addresses.items():
        if not address:  # other machines of the fleet have them
            continue
        host = hosts[name]
        if is_loopback(host):
            yield DoctorFinding(f"{name} listener", "ok", f"{address} is reachable from this machine only")
        elif config.tls.certificate_file and is_for_known[name]:
            yield DoctorFinding(
                f"{name} listener", "ok", f"{host} is reachable from other machines, with TLS and {keys}"
            )
        else:
            missing = " and ".join(
                what
                for what, is_there in (("TLS", config.tls.certificate_file), ("API keys", is_for_known[name]))
                if not is_there
            )
            detail = f"{host} is reachable from other machines without {missing} (kvloom up --help)"
            yield DoctorFinding(f"{name} listener", "warning", detail)


def _callers(config: KvloomConfig) -> DoctorFinding:
    if config.callers.anonymous == "shared":
        return DoctorFinding("callers", "warning", "anonymous callers share cached prompts (callers.anonymous)")
    return DoctorFinding("callers", "ok", "callers are isolated by credential or address")


def _tenant_tables(folder: RunFolder, state: FabricState) -> list[DoctorFinding]:
    """A process that does not follow the table of tenants serves keys that are revoked."""
    behind = not_following(folder.data_dir, state.processes, time.time())
    name = "tables of tenants"
    return [DoctorFinding(name, "failed", one) for one in behind] or [
        DoctorFinding(name, "ok", "all processes follow control's")
    ]


async def _redis(config: KvloomConfig) -> DoctorFinding:
    """Tries to enter without the password."""
    parts = urlsplit(config.redis.url)
    place = parts.path if parts.scheme == "unix" else join_address(parts.hostname or "localhost", parts.port or 6379)
    attempt = await attempt_redis(config.redis.url)
    if attempt.outcome == "served":
        return DoctorFinding("Redis", "failed", f"{place} needs no password: anyone who reaches it can stop the fabric")
    if attempt.outcome == "refused" and parts.scheme == "redis" and not place.startswith(_LOOPBACK):
        return DoctorFinding("Redis", "warning", f"{place} wants a password, which is sent without TLS: use rediss://")
    return _met(attempt, "Redis", place)


async def _ports(state: FabricState, trust: FabricTrust) -> AsyncIterator[DoctorFinding]:
    """Tries the ports inside the fabric as a stranger, without TLS and with it, and as a member."""
    for process in state.processes:
        address = process.internal_address if process.router_address else process.address
        if process.role not in ("shard", "safety", "control", "orchestrator", "router") and not process.router_address:
            continue
        name = f"{process.name} port"
        if not address:
            yield DoctorFinding(name, "failed", "it does not ask for the fabric's secret")
            continue
        role = "router" if process.router_address else process.role
        if await _answers(NO_SECRET, address, role):
            yield DoctorFinding(name, "failed", f"{address} serves strangers")
        elif not await _answers(trust, address, role):
            yield DoctorFinding(name, "failed", f"{address} does not serve its own fabric either")
        elif (attempt := await attempt_http2(reachable_address(address))).outcome == "refused":
            yield DoctorFinding(name, "ok", f"{address} serves only its fabric")
        else:
            yield _met(attempt, name, address)


async def client_ports(config: KvloomConfig, state: FabricState) -> AsyncIterator[DoctorFinding]:
    """Asks every edge for its models, and every process for its metrics, without a key, in the way in which clients
    reach them."""
    with_tls = bool(config.tls.certificate_file)
    for process in state.processes:
        for address in filter(None, (process.metrics_address, process.router_metrics_address)):
            is_edge = process.role == "edge" and address == process.metrics_address
            attempt = await attempt_http(reachable_address(address), "/metrics", with_tls=with_tls)
            needs_key = authenticates(config) if is_edge else authenticates_scrapers(config)
            yield _met(attempt, f"{process.name} metrics", address, served=_if_served(config, needs_key=needs_key))
            if is_edge:
                attempt = await attempt_http(reachable_address(address), "/v1/models", with_tls=with_tls)
                served = _if_served(config, needs_key=authenticates(config))
                yield _met(attempt, f"{process.name} API", address, served=served)


def _if_served(config: KvloomConfig, *, needs_key: bool) -> tuple[Outcome, str]:
    """Returns what it means that a stranger is served. `needs_key`: a key is demanded there."""
    if needs_key or config.tls.client_ca_file:
        return "failed", "serves strangers who reach it"
    if config.control.enabled:
        return "warning", "serves strangers who reach it: --api-keys FILE names those who may scrape"
    if config.tls.certificate_file:
        return "warning", "serves strangers who reach it, with TLS and without a key"
    return "ok", "serves strangers who reach it, like the API"


def _met(
    attempt: StrangerAttempt, name: str, address: str, served: tuple[Outcome, str] = ("failed", "serves strangers")
) -> DoctorFinding:
    """Returns what an attempt shows. `served`: what it means that it was served."""
    if attempt.outcome == "served":
        return DoctorFinding(name, served[0], f"{address} {served[1]}")
    if attempt.outcome == "refused":
        return DoctorFinding(name, "ok", f"{address} refuses strangers")
    return DoctorFinding(name, "unknown", f"whether {address} refuses strangers cannot be told: {attempt.detail}")


async def _answers(trust: FabricTrust, address: str, role: str) -> bool:
    """True when any answer comes, even an error of the method."""
    async with trust.open_channel(address, role) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            return error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True


TIMEOUT_SECONDS: Final = 5.0
_HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""With which every client of HTTP/2 begins: the preface and empty settings."""


class StrangerAttempt(NamedTuple):
    """One attempt, and what came of it."""

    outcome: Literal["served", "refused", "unknown"]
    detail: str
    """Says what the stranger met."""


_CLOSED: Final = StrangerAttempt("unknown", "the connection was closed without an answer")


async def attempt_http(address: str, path: str, *, with_tls: bool) -> StrangerAttempt:
    """GET without a key, and with TLS without a certificate. `address`: host:port."""
    host, port = split_address(address)
    request = f"GET {path} HTTP/1.1\r\nHost: {url_host(host)}\r\nConnection: close\r\n\r\n".encode()
    answer = await _sent(host, port, request, _tls() if with_tls else None)
    if answer == _CLOSED and with_tls:
        # What was sent can lose the alert on its way: a server that demands a certificate sends it by itself.
        answer = await _sent(host, port, b"", _tls())
    if isinstance(answer, StrangerAttempt):
        return answer
    words = answer.split(b"\r\n")[0].split(b" ")
    status = words[1].decode(errors="replace") if words[0].startswith(b"HTTP/1.") and len(words) > 1 else ""
    if status == "200":
        return StrangerAttempt("served", "200")
    if status in ("401", "403"):
        return StrangerAttempt("refused", status)
    return StrangerAttempt("unknown", f"the answer was {status}" if status else "the answer was no HTTP")


async def attempt_http2(address: str) -> StrangerAttempt:
    """Begin HTTP/2 over TLS without a certificate, as gRPC does. `address`: host:port."""
    host, port = split_address(address)
    context = _tls()
    context.set_alpn_protocols(["h2"])
    answer = await _sent(host, port, _HTTP2_PREFACE, context)
    if isinstance(answer, StrangerAttempt):
        # A server of HTTP/2 that serves begins with its settings.
        return StrangerAttempt("refused", answer.detail) if answer == _CLOSED else answer
    return StrangerAttempt("served", "it takes clients without a certificate")


async def attempt_redis(url: str) -> StrangerAttempt:
    """PING without the password of the URL. With TLS any certificate is taken."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        answer = await _answer(asyncio.open_unix_connection(parts.path), b"PING\r\n")
    else:
        tls = _tls() if parts.scheme == "rediss" else None
        answer = await _sent(parts.hostname or "localhost", parts.port or 6379, b"PING\r\n", tls)
    if isinstance(answer, StrangerAttempt):
        return answer
    said = answer.split(b"\r\n")[0].decode(errors="replace")
    if said == "+PONG":
        return StrangerAttempt("served", "PING was answered")
    refused = said.startswith(("-NOAUTH", "-NOPERM", "-DENIED"))
    return StrangerAttempt("refused" if refused else "unknown", said)


async def _sent(host: str, port: int, message: bytes, tls: ssl.SSLContext | None) -> bytes | StrangerAttempt:
    return await _answer(asyncio.open_connection(host, port, ssl=tls), message)


async def _answer(
    opening: Coroutine[None, None, tuple[asyncio.StreamReader, asyncio.StreamWriter]], message: bytes
) -> bytes | StrangerAttempt:
    """The first bytes with which a server answers a message, or why there are none."""
    is_open = False
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            reader, writer = await opening
            is_open = True
            try:
                writer.write(message)
                answer = await reader.read(4096)
            finally:
                writer.transport.abort()  # closing TLS in order would wait for a server that may never say goodbye
    except ssl.SSLError as error:
        # An alert is a sentence of the server: it has ended the handshake. Other failures say nothing about it.
        if "ALERT" in (error.reason or ""):
            return StrangerAttempt("refused", "it demands a certificate")
        return StrangerAttempt("unknown", f"TLS failed: {error.reason or error}")
    except TimeoutError:
        return StrangerAttempt("unknown", f"no answer within {TIMEOUT_SECONDS:g} s")
    except (OSError, ValueError) as error:
        if is_open:
            return _CLOSED
        return StrangerAttempt("unknown", f"it cannot be reached: {getattr(error, 'strerror', None) or error}")
    return answer or _CLOSED


def _tls() -> ssl.SSLContext:
    """A stranger takes any certificate: only what the server demands is of interest."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
