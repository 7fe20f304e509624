"""Certificates and tokens that have ended, at a real edge and a real router: nothing is served to their holders, also
over connections and streams that began before."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest

from kvloom.v1 import router_service_pb2 as pb
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from kvloom_common.access.listener_tls import ListenerTls
from kvloom_common.config import CertificateConfig, ControlConfig, TlsConfig
from kvloom_common.process.watched_files import following
from kvloom_common.tenancy.table import Key
from kvloom_common.trust.shared_secret import SharedSecret
from tests.fakes.certificates import Authority
from tests.fakes.control_world import Pb, control_world, entries_of
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_control import FakeControl, two_organisations
from tests.fakes.fake_issuer import fake_issuer
from tests.fakes.fake_router_link import answer
from tests.fakes.resume_world import CHAT
from tests.fakes.router_world import TIMEOUT_SECONDS, RouterWorld
from tests.fakes.tenants import callers_of, change
from tests.fakes.trusted_router import SECRET, served_router
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

WORKER = "spiffe://mesh/search"
MAPPED = [CertificateConfig(tenant="acme/search", uri=WORKER)]
ENTRY = f"cert:{WORKER}@acme/search"
ENDED = Key(ENTRY, b"", "acme/search", ("inference",), expires_at=1.0)
"""As control sends what was revoked (test_control_rights.py)."""
UNUSABLE = {"expired": (-2.0, -1.0), "not valid yet": (1.0, 2.0)}


def server_tls(folder: Path, authority: Authority) -> TlsConfig:
    (folder / "ca.pem").write_bytes(authority.pem)
    certificate, key = authority.issue_to(folder, "server")
    return TlsConfig(certificate_file=str(certificate), key_file=str(key), client_ca_file=str(folder / "ca.pem"))


def unusable(authority: Authority) -> list[tuple[bytes, bytes]]:
    """Certificates of the right name that TLS must refuse, with their keys."""
    stranger = Authority("mesh").issue("worker", WORKER)
    return [stranger, *(authority.issue("worker", WORKER, days=days) for days in UNUSABLE.values())]


# -- the edge ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def https_world(folder: Path, authority: Authority) -> AsyncIterator[tuple[EdgeWorld, str]]:
    callers = callers_of(folder, two_organisations(), certificates=MAPPED)
    async with edge_world(callers=callers) as world:
        world.link.script = answer("Hi")
        tls = ListenerTls(server_tls(folder, authority))
        yield world, f"https://{await world.server.listen('127.0.0.1', 0, tls.http_context())}{CHAT}"


def client_of(folder: Path, authority: Authority, shown: tuple[bytes, bytes]) -> aiohttp.ClientSession:
    """A client that keeps its one connection."""
    for name, content in zip(("client.pem", "client.key"), shown, strict=True):
        (folder / name).write_bytes(content)
    context = ssl.create_default_context(cadata=authority.pem.decode())
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=1))


async def status_of(http: aiohttp.ClientSession, url: str) -> int:
    async with http.post(url, json=chat_body()) as response:
        await response.read()
        return response.status


async def test_an_edge_serves_no_certificate_that_tls_must_refuse(tmp_path: Path) -> None:
    """Expired ones, those of the future, and those of another authority with the same name."""
    authority = Authority("mesh")
    async with https_world(tmp_path, authority) as (world, url):
        for shown in unusable(authority):
            async with client_of(tmp_path, authority, shown) as http:
                with pytest.raises((aiohttp.ClientError, OSError)):
                    await status_of(http, url)
        assert not world.link.requests


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_an_edge_ends_a_certificate_also_on_an_open_connection(tmp_path: Path, how: str) -> None:
    """TLS looks at a certificate when a connection begins, and no further."""
    authority = Authority("mesh")
    own = authority.issue("worker", WORKER)
    async with https_world(tmp_path, authority) as (world, url), client_of(tmp_path, authority, own) as http:
        assert await status_of(http, url) == 200
        identities = world.edge.callers._callers.identities
        assert identities is not None
        if how == "revoked":
            change(identities, ENDED)
        else:
            identities.tenants._now = lambda: time.time() + 2 * 86_400.0
        assert await status_of(http, url) == 401
        assert len(world.link.requests) == 1


# -- the router -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def control(world: RouterWorld, tmp_path: Path) -> AsyncIterator[FakeControl]:
    control = FakeControl(trust=SharedSecret(SECRET, ("control",), "control"))
    control.put(*two_organisations())
    port = await control.start()
    world.config.data_dir = str(tmp_path)
    world.config.control = ControlConfig(enabled=True, host="127.0.0.1", port=port, certificates=MAPPED)
    yield control
    await control.stop()


def channel_of(address: str, authority: Authority, shown: tuple[bytes, bytes]) -> grpc.aio.Channel:
    certificate, key = shown
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority.pem, key, certificate))


async def test_a_router_serves_no_certificate_that_tls_must_refuse(
    world: RouterWorld, control: FakeControl, tmp_path: Path
) -> None:
    """As the edge."""
    assert control.address
    authority = Authority("mesh")
    world.config.tls = server_tls(tmp_path, authority)
    async with served_router(world) as (_, address):
        for shown in unusable(authority):
            async with channel_of(address, authority, shown) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as info:
                    await RouterServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_SECONDS)
                assert info.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_revoked_certificate_ends_its_streams_at_a_router(
    world: RouterWorld, control: FakeControl, tmp_path: Path
) -> None:
    """A stream may last for weeks, and so may its connection."""
    authority = Authority("mesh")
    world.config.tls = server_tls(tmp_path, authority)
    async with served_router(world) as (server, address):
        identities = server.callers.identities
        assert identities is not None
        await eventually(lambda: identities.tenants.connected, "the table")
        async with channel_of(address, authority, authority.issue("worker", WORKER)) as channel:
            stub = RouterServiceStub(channel)
            stream = stub.Connect()
            await stream.write(pb.RouterServiceConnectRequest(hello=pb.ClientHello(client_id="worker")))
            assert (await stream.read()).HasField("fleet")
            control.put(ENDED)
            assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as info:
                await stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_SECONDS)
            assert info.value.code() is grpc.StatusCode.UNAUTHENTICATED


# -- tokens -----------------------------------------------------------------------------------------------------------


async def test_a_disabled_users_token_is_refused_although_it_lives_on(tmp_path: Path) -> None:
    """From the directory of a real control service to an edge. The issuer gives out tokens as before."""
    async with control_world(f"sqlite:///{tmp_path}/control.db") as directory, fake_issuer() as issuer:
        await directory.ask("CreateProject", project=Pb.Project(id="acme/search"), create_organisation=True)
        role = [Pb.Membership(organisation="acme", role="member")]
        await directory.ask("CreateUser", user=Pb.User(id="acme/ada", memberships=role), as_admin_of="acme")
        entry = Pb.ApiKey(id="oidc:login:ada", project="acme/search", user="acme/ada")
        await directory.ask("CreateKey", key=entry, as_admin_of="acme")
        callers = callers_of(tmp_path, entries_of(await directory.table()), issuers=[issuer.config()])
        identities = callers.identities
        assert identities is not None
        async with following(identities), edge_world(callers=callers) as world:
            world.link.script = answer("Hi")
            token = issuer.token()
            headers = {"Authorization": f"Bearer {token}"}
            status, body = await world.post(CHAT, chat_body(), headers=headers)
            assert status == 200, body
            disabled = Pb.User(id="acme/ada", disabled=True)
            await directory.ask("UpdateUser", user=disabled, update_mask={"paths": ["disabled"]}, as_admin_of="acme")
            identities.tenants.use(await directory.table(), time.time())
            for shown in (token, issuer.token()):
                status, _ = await world.post(CHAT, chat_body(), headers={"Authorization": f"Bearer {shown}"})
                assert status == 401
