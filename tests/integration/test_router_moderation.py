"""The router passes moderations on to the safety service, over every kind of link."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from kvloom import Client, Moderation, SyncClient
from kvloom.errors import KvloomError
from kvloom.router_link.group import RouterGroup
from kvloom.router_link.link import RouterLink
from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import ModerateRequest
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from tests.fakes.fake_safety import CATEGORIES
from tests.fakes.router_world import RouterWorld
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)


async def links(world: RouterWorld) -> list[RouterLink]:
    group = RouterGroup("edge-1", [world.address])
    local = world.server.local_link("edge-2")
    await group.start()
    await local.start()
    found: list[RouterLink] = [await world.connect(), group, local]
    for link in found:
        await eventually(lambda link=link: link.connected, "the link")
    return found


async def test_every_link_gets_the_policys_answer(world: RouterWorld) -> None:
    """An edge beside its router and one that is connected to it get the same results as a gRPC client."""
    safety = await world.start_safety()
    await world.start_router()
    await eventually(lambda: safety.num_streams == 1, "the safety link")
    request = ModerateRequest(texts=["nice", "a forbidden thing"])
    connected = await links(world)
    try:
        for link in connected:
            found = await link.moderate(request)
            assert [list(result.categories) for result in found.results] == [[], list(CATEGORIES[:1])]
            assert (list(found.categories), found.policy_revision) == (list(CATEGORIES), "1")
            with pytest.raises(KvloomError, match="at least one text"):
                await link.moderate(ModerateRequest())
    finally:
        for link in connected:
            await link.close()
    async with grpc.aio.insecure_channel(world.address) as channel:
        assert await RouterServiceStub(channel).Moderate(request) == found


async def test_the_sdk_judges_texts(world: RouterWorld) -> None:
    """A program that never generates can use the policy too, with an event loop or without one."""
    safety = await world.start_safety()
    await world.start_router()
    await eventually(lambda: safety.num_streams == 1, "the safety link")
    async with Client(world.address) as client:
        nice, bad = await client.moderate("nice", "a forbidden thing")
        assert not nice
        assert bad
        assert bad == Moderation(CATEGORIES[:1], CATEGORIES, "1")
        with pytest.raises(KvloomError, match="at least one text"):
            await client.moderate()

    def from_a_thread() -> list[Moderation]:
        with SyncClient(world.address) as client:
            return client.moderate("nice", "a forbidden thing")

    assert await asyncio.to_thread(from_a_thread) == [nice, bad]


async def test_without_a_safety_service(world: RouterWorld) -> None:
    """The caller is told that nothing was judged: when no service is configured, and when it is lost."""
    await world.start_router()
    async with grpc.aio.insecure_channel(world.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await RouterServiceStub(channel).Moderate(ModerateRequest(texts=["x"]))
    assert from_rpc_error(refused.value).reason == ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE


async def test_a_lost_safety_service(world: RouterWorld) -> None:
    """An outage is an error with advice, never a result."""
    safety = await world.start_safety()
    await world.start_router()
    await eventually(lambda: safety.num_streams == 1, "the safety link")
    await safety.stop()
    link = world.server.local_link("edge-0")
    await link.start()
    with pytest.raises(KvloomError) as refused:
        await link.moderate(ModerateRequest(texts=["x"]))
    await link.close()
    assert refused.value.reason == ErrorReason.ERROR_REASON_SAFETY_UNAVAILABLE
    assert refused.value.retry_after_seconds
