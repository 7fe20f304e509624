"""Clients' certificates on a list of their authority: refused within about a second, also on connections and streams
that are open, while another certificate of the same name is served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.access.listener_tls import ListenerTls
from kvloom_common.access.revoked_certificates import read_lists
from kvloom_common.config import ConfigError, TlsConfig
from kvloom_common.process.watched_files import following
from tests.fakes.certificates import Authority
from tests.fakes.edge_world import edge_world
from tests.fakes.fake_router_link import answer
from tests.fakes.resume_world import CHAT
from tests.fakes.router_world import TIMEOUT_SECONDS, RouterWorld
from tests.fakes.trusted_router import served_router
from tests.integration.test_ended_identities import channel_of, client_of, server_tls, status_of

pytest_plugins = ("tests.fakes.router_fixtures",)


def listed(folder: Path, authority: Authority) -> TlsConfig:
    """The settings of a listener with a list, which names none yet."""
    config = server_tls(folder, authority)
    config.client_crl_file = str(folder / "revoked.pem")
    revoke(folder, authority)
    return config


def revoke(folder: Path, authority: Authority, *certificates: bytes) -> None:
    (folder / "revoked.pem").write_bytes(authority.revoking(*certificates))


async def test_an_edge_serves_no_revoked_certificate(tmp_path: Path) -> None:
    """Neither on its open connection, nor on a new one, nor with a header that edges send to one another."""
    authority = Authority("mesh")
    old, new = authority.issue("worker"), authority.issue("worker")
    tls = ListenerTls(listed(tmp_path, authority), 0.05)
    async with edge_world() as world, following(tls):
        world.link.script = answer("Hi")
        world.edge.callers.revoked = tls.revoked
        url = f"https://{await world.server.listen('127.0.0.1', 0, tls.http_context())}{CHAT}"
        async with client_of(tmp_path, authority, old) as http:
            assert await status_of(http, url) == 200
            revoke(tmp_path, authority, old[0])
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while await status_of(http, url) == 200:
                    pass
            num_served = len(world.link.requests)
            assert await status_of(http, url) == 401
            http.headers["x-kvloom-relayed"] = "tag"
            assert await status_of(http, url) == 401
        async with client_of(tmp_path, authority, old) as http:
            assert await status_of(http, url) == 401
        assert len(world.link.requests) == num_served
        async with client_of(tmp_path, authority, new) as http:
            assert await status_of(http, url) == 200
        (tmp_path / "revoked.pem").write_text("broken")  # keeps what it has
        async with client_of(tmp_path, authority, old) as http:
            assert await status_of(http, url) == 401


async def test_a_router_ends_the_streams_of_a_revoked_certificate(
    world: RouterWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the edge; a stream may last for weeks."""
    monkeypatch.setattr("router.assembly.listener_tls", lambda config: ListenerTls(config, 0.05))
    authority = Authority("mesh")
    old, new = authority.issue("worker"), authority.issue("worker")
    world.config.tls = listed(tmp_path, authority)
    async with served_router(world) as (_, address), channel_of(address, authority, old) as channel:
        stub = RouterServiceStub(channel)
        await stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_SECONDS)
        stream = stub.Connect()
        await stream.write(pb.RouterServiceConnectRequest(hello=pb.ClientHello(client_id="worker")))
        assert (await stream.read()).HasField("fleet")
        revoke(tmp_path, authority, old[0])
        async with asyncio.timeout(TIMEOUT_SECONDS):
            assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
        for call in (
            stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_SECONDS),
            stub.Generate(pb.GenerateRequest(), timeout=TIMEOUT_SECONDS),
            stub.Connect(iter(()), timeout=TIMEOUT_SECONDS),
        ):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        async with channel_of(address, authority, new) as other:
            await RouterServiceStub(other).ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_SECONDS)


def test_lists_that_nobody_has_signed_are_refused() -> None:
    """A file that only looks like a list must not lock clients out; and an empty file protects against nothing."""
    own, other = Authority("mesh"), Authority("mesh")
    certificate, _ = own.issue("worker")
    assert len(read_lists(own.revoking(certificate) + own.revoking(), own.pem, "f")) == 1
    for content, message in (
        (other.revoking(certificate), "no authority"),
        (b"", "no list"),
        (own.pem, "no list"),
        (own.revoking(certificate)[:40] + b"\n-----END X509 CRL-----", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_lists(content, own.pem, "f")
    with pytest.raises(ValueError, match="client_ca_file"):
        TlsConfig(certificate_file="c", key_file="k", client_crl_file="l")
