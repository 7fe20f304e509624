"""TLS for clients: on the HTTP and the gRPC port, with certificates that can be replaced, and with clients' own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edge_http.edge import Edge
from edge_http.server.http_server import EdgeServer
from kvloom.client.credentials import TlsOptions, channel_opener
from kvloom_common.access.listener_tls import ListenerTls
from kvloom_common.config import ConfigError, KvloomConfig, TlsConfig
from kvloom_common.models.served_model import ServedModel
from kvloom_common.process.service import set_serving
from kvloom_common.process.watched_files import following
from kvloom_common.transport.standard_services import add_health_and_reflection
from tests.fakes.certificates import Authority
from tests.fakes.fake_router_link import FakeRouterLink
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

RELOAD_SECONDS = 10
POLL_SECONDS = 0.05


def tls_config(folder: Path, server: Authority, clients: Authority | None = None) -> TlsConfig:
    certificate, key = server.issue_to(folder, "server")
    if clients is None:
        return TlsConfig(certificate_file=str(certificate), key_file=str(key))
    client_ca = folder / "clients.pem"
    client_ca.write_bytes(clients.pem)
    return TlsConfig(certificate_file=str(certificate), key_file=str(key), client_ca_file=str(client_ca))


def trusting(authority: Authority, own: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=authority.pem.decode())
    if own is not None:
        context.load_cert_chain(*own)
    return context


@contextlib.asynccontextmanager
async def https_edge(tls: ListenerTls, *, taken_over: bool) -> AsyncIterator[str]:
    model = ServedModel("tiny", model_tokenizer(), 1_700_000_000, "fp_test")
    server = EdgeServer(Edge(KvloomConfig(), FakeRouterLink(), {"tiny": model}))
    if taken_over:
        listener = socket.create_server(("127.0.0.1", 0))
        address = await server.take_over(listener, tls.http_context())
    else:
        address = await server.listen("127.0.0.1", 0, tls.http_context())
    try:
        yield f"https://{address}/live"
    finally:
        await server.stop()


async def get(url: str, context: ssl.SSLContext) -> int:
    """A request over a connection of its own."""
    async with aiohttp.ClientSession() as http, http.get(url, ssl=context) as response:
        return response.status


async def until_served(url: str, context: ssl.SSLContext) -> None:
    async def is_served() -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            return await get(url, context) == 200
        return False

    await eventually(is_served, f"{url} is served", RELOAD_SECONDS)


@pytest.mark.parametrize("taken_over", [False, True], ids=["own port", "the supervisor's socket"])
async def test_http_certificate_is_replaced_without_a_restart(tmp_path: Path, taken_over: bool) -> None:
    """Certificates live for weeks, edges for months."""
    first, second = Authority("first"), Authority("second")
    tls = ListenerTls(tls_config(tmp_path, first), POLL_SECONDS)
    async with https_edge(tls, taken_over=taken_over) as url, following(tls):
        assert await get(url, trusting(first)) == 200
        with pytest.raises(aiohttp.ClientError):
            await get(url, trusting(second))
        (tmp_path / "server.pem").write_text("broken")  # keeps what it has
        second.issue_to(tmp_path, "server")
        await until_served(url, trusting(second))
        with pytest.raises(aiohttp.ClientError):
            await get(url, trusting(first))


async def test_http_clients_need_a_certificate_of_the_authority(tmp_path: Path) -> None:
    """With `client_ca_file` nothing is served to others, also after the authority was replaced."""
    server, clients, others = Authority("issuer"), Authority("clients"), Authority("others")
    known, stranger = clients.issue_to(tmp_path, "known"), others.issue_to(tmp_path, "stranger")
    tls = ListenerTls(tls_config(tmp_path, server, clients), POLL_SECONDS)
    async with https_edge(tls, taken_over=False) as url, following(tls):
        assert await get(url, trusting(server, known)) == 200
        for context in (trusting(server), trusting(server, stranger)):
            with pytest.raises((aiohttp.ClientError, OSError)):
                await get(url, context)
        (tmp_path / "clients.pem").write_bytes(others.pem)
        await until_served(url, trusting(server, stranger))
        with pytest.raises((aiohttp.ClientError, OSError)):
            await get(url, trusting(server, known))


@contextlib.asynccontextmanager
async def grpcs_server(tls: ListenerTls) -> AsyncIterator[str]:
    server = grpc.aio.server()
    health = add_health_and_reflection(server, (), with_reflection=False)
    port = tls.add_port(server, "127.0.0.1:0")
    await server.start()
    await set_serving(health, (), True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def check(address: str, tls: TlsOptions | None) -> bool:
    async with channel_opener(tls=tls)(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    return code == grpc.StatusCode.OK


async def test_grpc_certificate_and_client_authority(tmp_path: Path) -> None:
    """The gRPC port keeps the same rules as the HTTP port."""
    first, second, clients = Authority("first"), Authority("second"), Authority("clients")
    certificate, key = clients.issue_to(tmp_path, "client")
    for authority in (first, second):
        (tmp_path / f"{id(authority)}.pem").write_bytes(authority.pem)
    tls = ListenerTls(tls_config(tmp_path, first, clients), POLL_SECONDS)

    def options(authority: Authority, *, with_own: bool = True) -> TlsOptions:
        ca_file = tmp_path / f"{id(authority)}.pem"
        return TlsOptions(ca_file, certificate, key) if with_own else TlsOptions(ca_file)

    async with grpcs_server(tls) as address, following(tls):
        assert await check(address, options(first))
        assert not await check(address, options(first, with_own=False))
        assert not await check(address, None)
        second.issue_to(tmp_path, "server")
        async with asyncio.timeout(RELOAD_SECONDS):
            while not await check(address, options(second)):
                pass


def test_unusable_files_are_named(tmp_path: Path) -> None:
    """A listener that cannot use its certificate must not start, nor listen without TLS."""
    config = tls_config(tmp_path, Authority("a"))
    (tmp_path / "server.key").write_text("no key")
    with pytest.raises(ConfigError, match=r"server\.key"):
        ListenerTls(config)
    with pytest.raises(ConfigError, match="missing"):
        ListenerTls(TlsConfig(certificate_file=str(tmp_path / "missing"), key_file=config.key_file))
