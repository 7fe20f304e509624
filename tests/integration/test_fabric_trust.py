"""Processes of a fabric recognise one another by its secret, over real sockets and a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest
import redis.asyncio
import redis.exceptions

from edge_http.recovery.edge_membership import join_edges
from edge_http.server.process import peers_at
from kvloom.v1 import shard_service_pb2, shard_service_pb2_grpc
from kvloom_common.config import EdgeConfig, RedisConfig
from kvloom_common.discovery.records import RouterRecord, ShardRecord
from kvloom_common.discovery.registry import RouterRegistry, ShardRegistry, records_of
from kvloom_common.private_file import write_private_file
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust
from kvloom_common.trust.identity import issue_identity
from kvloom_common.trust.secret import FabricSecret, write_secret
from kvloom_common.trust.shared_secret import IdentityTrust, SharedSecret
from tests.fakes.edge_peers import begin, published
from tests.fakes.edge_world import edge_world
from tests.fakes.shard_world import shard_world
from tests.waiting import eventually
from tools.supervisor.child import bound_command
from tools.supervisor.embedded_redis import embedded_redis, embedded_redis_url

SECRET = FabricSecret.draw()


def trust(role: str, name: str = "test", secret: FabricSecret = SECRET) -> SharedSecret:
    return SharedSecret(secret, (role,), name)


async def drain(address: str, caller: FabricTrust, name: str = "shard-0") -> str:
    """The outcome of ShardService.Drain: "ok" or the status code."""
    async with caller.open_channel(address, "shard", name) as channel:
        stub = shard_service_pb2_grpc.ShardServiceStub(channel)
        try:
            await stub.Drain(shard_service_pb2.DrainRequest(draining=True), timeout=5.0)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "ok"


async def test_a_shard_obeys_only_processes_of_its_fabric() -> None:
    """Any local user could drain the shards, and so stop the fabric."""
    async with shard_world(trust=trust("shard", "shard-0")) as world:
        assert await drain(world.address, NO_SECRET) == "UNAVAILABLE"
        assert await drain(world.address, trust("router", secret=FabricSecret.draw())) == "UNAVAILABLE"
        assert await drain(world.address, trust("shard", "shard-1")) == "PERMISSION_DENIED"
        assert await drain(world.address, trust("tools")) == "ok"


async def test_a_client_accepts_only_the_process_that_it_wants() -> None:
    """The port of a dead shard may belong to another process of the fabric by now."""
    async with shard_world(trust=trust("shard", "shard-0")) as world:
        assert await drain(world.address, trust("router"), "shard-1") == "UNAVAILABLE"
        assert await drain(world.address, trust("tools"), "shard-0") == "ok"


async def test_records_that_the_fabric_has_not_signed_are_ignored(redis_url: str) -> None:
    """An attacker who can write to Redis could send prompts to a shard of his own."""
    signed = ShardRegistry(redis_url, "trust-records", trust("shard").sealer)
    others = [
        ShardRegistry(redis_url, "trust-records"),
        ShardRegistry(redis_url, "trust-records", trust("shard", secret=FabricSecret.draw()).sealer),
    ]
    try:
        await signed.announce(ShardRecord("good", "127.0.0.1:1", "m", "1"))
        for number, registry in enumerate(others):
            await registry.announce(ShardRecord(f"bad-{number}", "127.0.0.1:2", "m", "1"))
        assert list(await signed.list_shards()) == ["good"]
    finally:
        for registry in (signed, *others):
            await registry.close()


async def test_a_record_cannot_be_copied_to_another_name(redis_url: str) -> None:
    """A signed record that is stored under another shard's key would take its place."""
    registry = RouterRegistry(redis_url, "trust-copies", trust("router").sealer)
    try:
        await registry.announce(RouterRecord("127.0.0.1:1", "router-0"))
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            copied = await client.get("trust-copies:router:127.0.0.1:1")
            assert copied
            await client.set("trust-copies:router:127.0.0.1:2", copied)
            await client.sadd("trust-copies:router_ids", "127.0.0.1:2")
        assert list(await registry.list_routers()) == ["127.0.0.1:1"]
    finally:
        await registry.close()


async def test_the_journal_holds_no_readable_text(redis_url: str) -> None:
    """Prompts and answers of resumable streams are in Redis while they run; its readers must not see them."""
    async with edge_world(EdgeConfig()) as world:
        settings = RedisConfig(url=redis_url, key_prefix="trust-journal")
        peers = join_edges(world.edge, settings, world.url.removeprefix("http://"), trust("edge"))
        assert peers is not None
        try:
            _, request = await begin(world, 3)
            request.tokens("a very private answer ")
            await published(peers)
            async with redis.asyncio.Redis.from_url(redis_url) as client:
                stored = b""
                async for key in client.scan_iter("trust-journal:*"):
                    kind = await client.type(key)
                    if kind == b"hash":
                        stored += repr(await client.hgetall(key)).encode()
                    elif kind == b"stream":
                        stored += repr(await client.xrange(key)).encode()
            assert stored
            for text in (b"private", b"hello", b"role", world.url.encode()):
                assert text not in stored
        finally:
            await peers.close()


async def test_edges_ask_one_another_for_a_certificate() -> None:
    """The port for other edges would else be a second entrance, without what guards the first."""
    async with edge_world(EdgeConfig()) as world:
        own = trust("edge", "edge-0")
        tls = own.server_tls()
        world.edge.may_connect = peers_at(tls, own)
        address = await world.server.listen("127.0.0.1", 0, tls)
        async with aiohttp.ClientSession() as session:
            url = f"https://{address}/live"
            peer = trust("edge", "edge-1")
            async with session.get(url, ssl=peer.client_tls(), server_hostname=peer.server_hostname("edge")) as answer:
                assert answer.status == 200
            for role, status in (("tools", 200), ("shard", 403), ("router", 403)):
                async with session.get(
                    url, ssl=trust(role).client_tls(), server_hostname=peer.server_hostname("edge")
                ) as answer:
                    assert answer.status == status
            stranger = trust("edge", "edge-2", FabricSecret.draw())
            for context in (False, stranger.client_tls()):
                with pytest.raises((aiohttp.ClientError, OSError)):
                    async with session.get(url, ssl=context, server_hostname=peer.server_hostname("edge")) as answer:
                        await answer.read()


async def test_a_rotation_breaks_no_stream_and_ends_the_old_secret(tmp_path: Path) -> None:
    """Operators rotate secrets while users are served: open streams stay, and in the end the old secret is useless."""
    path = tmp_path / "secret"
    write_secret(path, SECRET)
    shard = SharedSecret(SECRET, ("shard",), "shard-0", path, poll_seconds=0.05)
    new = b"n" * 32
    accepts = SECRET.with_accepted(new)
    uses = accepts.with_used(new)
    async with (
        shard_world(trust=shard) as world,
        _watched(shard),
        trust("router").open_channel(world.address, "shard", "shard-0") as channel,
    ):
        stream = shard_service_pb2_grpc.ShardServiceStub(channel).Connect()
        hello = shard_service_pb2.RouterHello(router_id="router")
        await stream.write(shard_service_pb2.ShardServiceConnectRequest(hello=hello))
        assert (await stream.read()).HasField("hello")
        for step in (accepts, uses, uses.without_others()):
            write_secret(path, step)
            await _until(shard, step)
            assert await drain(world.address, trust("tools", secret=step)) == "ok"
        assert await drain(world.address, trust("router")) == "UNAVAILABLE"
        snapshot = shard_service_pb2.ShardServiceConnectRequest(want_kv_snapshot=True)
        await stream.write(snapshot)
        assert await stream.read() is not grpc.aio.EOF


@contextlib.asynccontextmanager
async def _watched(followed: FabricTrust) -> AsyncIterator[None]:
    task = asyncio.create_task(followed.watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _until(followed: SharedSecret, secret: FabricSecret) -> None:
    expected = next(iter(secret.keys("registry")))

    def is_known() -> bool:
        signed = followed.sealer.sign("key", b"{}")
        return expected.encode() in signed and len(followed._secret.secrets) == len(secret.secrets)

    await eventually(is_known, "the secret is known")


@pytest.fixture
async def own_redis(tmp_path: Path) -> AsyncIterator[str]:
    """An embedded server as `kvloom up` starts it."""
    with embedded_redis_url(tmp_path) as url:
        spec = embedded_redis(url, tmp_path)
        process = await asyncio.create_subprocess_exec(*bound_command(spec.argv), stdout=asyncio.subprocess.DEVNULL)
        assert spec.probe is not None
        await eventually(spec.probe, "the server answers")
        try:
            yield url
        finally:
            process.kill()
            await process.wait()


async def test_the_embedded_redis_wants_its_password_and_refuses_an_administrators_commands(own_redis: str) -> None:
    """Any local user could fill it, read it or shut it down, and no shard could register any more."""
    async with redis.asyncio.Redis.from_url(own_redis) as client:
        assert await client.set("a", "1")
        for command in (["SHUTDOWN", "NOSAVE"], ["FLUSHALL"], ["CONFIG", "GET", "*"], ["ACL", "LIST"], ["KEYS", "*"]):
            with pytest.raises(redis.exceptions.NoPermissionError):
                await client.execute_command(*command)
    scheme, _, rest = own_redis.partition("://")
    async with redis.asyncio.Redis.from_url(f"{scheme}://{rest.rpartition('@')[2]}") as client:
        with pytest.raises(redis.exceptions.RedisError, match="authenticated"):
            await client.get("a")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_does_not_reach_the_embedded_redis(own_redis: str) -> None:
    """Its socket is for this user alone."""
    path = own_redis.rpartition("@")[2].partition("?")[0]
    code = f"import os, socket; os.setuid(65534); socket.socket(socket.AF_UNIX).connect({path!r})"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE)
    _, stderr = await process.communicate()
    assert b"PermissionError" in stderr


async def test_a_shard_with_an_identity_serves_and_is_rotated(redis_url: str, tmp_path: Path) -> None:
    """Routers find it by the record that it signs, and reach it; other processes refuse it; and after a rotation the
    old identity is useless."""
    path, prefix = tmp_path / "identity", "trust-identity"
    records = records_of(prefix, "shard", "gpu-7")
    old = issue_identity(SECRET, "shard", "gpu-7", records)
    shard = IdentityTrust(old, path, poll_seconds=0.05)
    new = b"n" * 32
    registry = ShardRegistry(redis_url, prefix, trust("router").sealer)
    announced = ShardRegistry(redis_url, prefix, shard.sealer)
    try:
        await announced.announce(ShardRecord("gpu-7", "127.0.0.1:1", "m", "1"))
        assert list(await registry.list_shards()) == ["gpu-7"]
        async with shard_world(trust=shard, shard_id="gpu-7") as world, _watched(shard):
            assert await drain(world.address, trust("tools"), "gpu-7") == "ok"
            assert await drain(world.address, trust("tools"), "gpu-8") == "UNAVAILABLE"
            assert await drain(world.address, IdentityTrust(old), "gpu-7") == "PERMISSION_DENIED"
            using = SECRET.with_accepted(new).with_used(new)
            finished = using.without_others()
            write_private_file(path, issue_identity(using, "shard", "gpu-7", records).format().encode())
            async with asyncio.timeout(20):
                while await drain(world.address, trust("tools", secret=finished), "gpu-7") != "ok":
                    pass
    finally:
        await registry.close()
        await announced.close()
    async with shard_world(trust=trust("shard", "gpu-8", finished), shard_id="gpu-8") as world:
        assert await drain(world.address, IdentityTrust(old), "gpu-8") == "UNAVAILABLE"
