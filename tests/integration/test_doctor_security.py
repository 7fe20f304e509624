"""What `kvloom doctor security` concludes from what a stranger meets: a refusal must have been said by the server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import grpc
import pytest

from kvloom_common.access.api_keys import ApiKey, digest_of, write_api_keys
from kvloom_common.config import KvloomConfig
from kvloom_common.metrics.server import MetricsServer
from kvloom_common.process.service import bind
from kvloom_common.trust.fabric_trust import NO_SECRET
from kvloom_common.trust.secret import FabricSecret
from kvloom_common.trust.shared_secret import SharedSecret
from tests.fakes.certificates import Authority
from tests.fakes.redis_server import redis_server
from tools.doctor.security import attempt_http, attempt_http2, attempt_redis, client_ports
from tools.supervisor.state import FabricState
from tools.supervisor.supervised_process import ProcessStatus

Outcome = Literal["served", "refused", "unknown"]


def config_of(folder: Path, *, tls: bool, keys: bool = False, certificates: bool = False) -> KvloomConfig:
    config, authority = KvloomConfig(), Authority("ca")
    if tls:
        certificate, key = authority.issue_to(folder, "server")
        config.tls.certificate_file, config.tls.key_file = str(certificate), str(key)
    if certificates:
        (folder / "ca.pem").write_bytes(authority.pem)
        config.tls.client_ca_file = str(folder / "ca.pem")
    if keys:
        write_api_keys(folder / "keys", [ApiKey("prometheus", digest_of("kvl-x"))])
        config.callers.api_keys_file = str(folder / "keys")
    return config


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(
    ("keys", "certificates", "expected"),
    [(False, False, "served"), (True, False, "refused"), (False, True, "refused"), (True, True, "refused")],
)
async def test_a_listener_is_closed_only_if_it_refuses(
    tmp_path: Path, tls: bool, keys: bool, certificates: bool, expected: Outcome
) -> None:
    """With TLS every open listener counted as closed, since the check spoke plain HTTP."""
    if certificates and not tls:
        pytest.skip("certificates of clients need TLS")
    server = MetricsServer(config_of(tmp_path, tls=tls, keys=keys, certificates=certificates), 0)
    try:
        attempt = await attempt_http(server.address, "/metrics", with_tls=tls)
        assert attempt.outcome == expected, attempt
        assert (await attempt_http(server.address, "/metrics", with_tls=not tls)).outcome == "unknown"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("tls", "keys", "outcome", "detail"),
    [
        (False, False, "ok", "serves strangers who reach it, like the API"),
        (True, False, "warning", "serves strangers who reach it, with TLS and without a key"),
        (True, True, "ok", "refuses strangers"),
    ],
)
async def test_a_fabric_is_met_as_its_clients_meet_it(
    tmp_path: Path, tls: bool, keys: bool, outcome: str, detail: str
) -> None:
    """It sent plain HTTP, took the failed handshake for a refusal, and called open metrics closed."""
    config = config_of(tmp_path, tls=tls, keys=keys)
    server = MetricsServer(config, 0)
    process = ProcessStatus("router", "router", 1, "ready", metrics_address=server.address)
    state = FabricState(
        supervisor_pid=1, supervisor_started=0.0, http_url="", router_address="", model="", processes=[process]
    )
    try:
        (found,) = [finding async for finding in client_ports(config, state)]
        assert (found.name, found.outcome, found.detail) == ("router metrics", outcome, f"{server.address} {detail}")
    finally:
        server.close()


@pytest.mark.parametrize("answer", [b"", b"hello\r\n", b"HTTP/1.1 500 Oh\r\n\r\n", b"HTTP/1.1 404 No\r\n\r\n"])
async def test_what_is_neither_served_nor_refused_is_unknown(answer: bytes) -> None:
    """A server that fails has not refused anybody."""
    async with answering(answer) as address:
        assert (await attempt_http(address, "/", with_tls=False)).outcome == "unknown"
    assert "cannot be reached" in (await attempt_http(address, "/", with_tls=False)).detail


async def test_ports_of_the_fabric_refuse_clients_without_its_certificate() -> None:
    """A stranger who speaks TLS is met as well, not only one who does not."""
    closed, opened = grpc.aio.server(), grpc.aio.server()
    trust = SharedSecret(FabricSecret.draw(), ("shard",), "shard-0")
    addresses = bind(closed, "127.0.0.1", 0, trust.add_port), bind(opened, "127.0.0.1", 0, NO_SECRET.add_port)
    for server in (closed, opened):
        await server.start()
    try:
        assert (await attempt_http2(addresses[0])).outcome == "refused"
        assert (await attempt_http2(addresses[1])).outcome == "unknown"  # it speaks no TLS
    finally:
        await asyncio.gather(closed.stop(0), opened.stop(0))


async def test_redis_is_closed_only_if_it_wants_a_password() -> None:
    """A Redis that is away, or that is reached by a wrong name, was called closed."""
    with redis_server() as server:
        assert (await attempt_redis(server.connection_url)).outcome == "served"
    assert (await attempt_redis("redis://127.0.0.1:1/0")).outcome == "unknown"


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
