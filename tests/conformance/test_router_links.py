"""The conformance suite, run on every implementation of RouterLink."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvloom.router_link.group import RouterGroup
from kvloom.router_link.link import RouterLink
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from tests.conformance.router_link_suite import LENGTH, LinkRig, RouterLinkSuite
from tests.fakes.fake_router_link import FakeRequest, FakeRouterLink
from tests.fakes.fake_shard import FakeShard, expected_tokens, token_text
from tests.fakes.router_world import MODEL, RouterWorld, num_ready_shards, router_world
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)


class RouterRig:
    """A real router and fake shards."""

    def __init__(self, link: RouterLink, shard: FakeShard, world: RouterWorld) -> None:
        self.link = link
        self._shard = shard
        self._world = world
        self._added: dict[str, FakeShard] = {}

    def hold(self) -> None:
        self._shard.pause()

    def go_on(self) -> None:
        self._shard.resume()

    @property
    def num_running(self) -> int:
        return self._shard.num_running

    async def add_model(self, name: str) -> None:
        self._added[name] = await self._world.start_shard(f"shard-{name}", model=name)

    async def remove_model(self, name: str) -> None:
        await self._world.registry.withdraw(f"shard-{name}")
        await self._added.pop(name).stop()


@contextlib.asynccontextmanager
async def router_rig(
    request: pytest.FixtureRequest, connect: Callable[[RouterWorld], Awaitable[RouterLink]]
) -> AsyncIterator[LinkRig]:
    async with router_world(request.getfixturevalue("router_redis_url")) as world:
        shard = await world.start_shard("shard-0", max_model_len=200_000)
        await world.start_router()
        link = await connect(world)
        await eventually(lambda: num_ready_shards(link), "a ready shard")
        try:
            yield RouterRig(link, shard, world)
        finally:
            await link.close()


class TestGrpcRouterLink(RouterLinkSuite):
    def open_rig(self, request: pytest.FixtureRequest) -> contextlib.AbstractAsyncContextManager[LinkRig]:
        return router_rig(request, lambda world: world.connect())


class TestRouterGroup(RouterLinkSuite):
    """A group one of whose routers is not there."""

    def open_rig(self, request: pytest.FixtureRequest) -> contextlib.AbstractAsyncContextManager[LinkRig]:
        async def connect(world: RouterWorld) -> RouterLink:
            group = RouterGroup("edge-0", [world.address, "127.0.0.1:1"])
            await group.start()
            return group

        return router_rig(request, connect)


class TestLocalRouterLink(RouterLinkSuite):
    def open_rig(self, request: pytest.FixtureRequest) -> contextlib.AbstractAsyncContextManager[LinkRig]:
        async def connect(world: RouterWorld) -> RouterLink:
            link = world.server.local_link("edge-0")
            await link.start()
            return link

        return router_rig(request, connect)


class FakeRig:
    """Plays a router with a fake shard that makes one token per loop iteration."""

    def __init__(self) -> None:
        self.link = FakeRouterLink(model=MODEL)
        self.link.script = self._play
        self._tasks: list[asyncio.Task[None]] = []
        self._may_step = asyncio.Event()
        self._may_step.set()
        self._running: set[FakeRequest] = set()
        self._models = [MODEL]

    def hold(self) -> None:
        self._may_step.clear()

    def go_on(self) -> None:
        self._may_step.set()

    @property
    def num_running(self) -> int:
        return len([request for request in self._running if not request.cancelled.is_set()])

    async def add_model(self, name: str) -> None:
        self._models.append(name)
        self._tell_models()

    async def remove_model(self, name: str) -> None:
        self._models.remove(name)
        self._tell_models()

    def _tell_models(self) -> None:
        self.link.tell(FleetState(models=[ModelInfo(name=name, num_ready_shards=1) for name in self._models]))

    def _play(self, request: FakeRequest) -> None:
        self._tasks.append(asyncio.create_task(self._answer(request)))

    async def _answer(self, fake: FakeRequest) -> None:
        request = fake.request
        begun = {choice.index: len(choice.token_ids) for choice in request.partial_choices}
        indexes = list(begun) or list(range(request.n))
        if request.wanted.model not in self._models:
            for index in indexes:
                fake.fail(ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, index=index)
            return
        self._running.add(fake)
        try:
            for index in indexes:
                fake.start(index)
            for position in range(request.wanted.stop.max_tokens):
                await self._may_step.wait()
                await asyncio.sleep(0)
                for index in indexes:
                    if position >= begun.get(index, 0):
                        token_id = expected_tokens(request.prompt_token_ids, index, position + 1)[-1]
                        fake.tokens(token_text(token_id), index, token_ids=[token_id])
            for index in indexes:
                fake.finish(LENGTH, index)
        except RuntimeError:  # a sink's bug
            self.link.cancel(fake.handle)
        finally:
            self._running.discard(fake)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class TestFakeRouterLink(RouterLinkSuite):
    """The fake link that the edge's tests rely on."""

    @contextlib.asynccontextmanager
    async def open_rig(self, request: pytest.FixtureRequest) -> AsyncIterator[LinkRig]:
        rig = FakeRig()
        yield rig
        await rig.close()
