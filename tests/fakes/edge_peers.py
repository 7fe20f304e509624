"""Edges that share a Redis, in one process: they die as by kill -9, and clients resume their streams at another
edge."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

from edge_http.recovery.edge_membership import EdgeMembership, join_edges
from kvloom_common.callers import Callers
from kvloom_common.config import KvloomConfig, RedisConfig
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.replay.stream_retention import ResumeSettings
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import FakeRequest, answer
from tests.fakes.resume_world import client
from tests.fakes.resuming_client import ResumingClient
from tests.waiting import eventually

_prefixes = itertools.count()


def join(world: EdgeWorld, redis: RedisConfig) -> EdgeMembership:
    peers = join_edges(world.edge, redis, world.url.removeprefix("http://"))
    assert peers is not None
    return peers


@contextlib.asynccontextmanager
async def edges(
    redis_url: str,
    count: int = 2,
    *,
    output: ParserSpec | None = None,
    callers: Callers | None = None,
    **resume: float,
) -> AsyncIterator[list[tuple[EdgeWorld, EdgeMembership]]]:
    redis = RedisConfig(url=redis_url, key_prefix=f"edge-resume-{next(_prefixes)}")
    async with contextlib.AsyncExitStack() as stack:
        started: list[tuple[EdgeWorld, EdgeMembership]] = []
        for _ in range(count):
            config = KvloomConfig(resume=ResumeSettings(**resume))
            world = await stack.enter_async_context(edge_world(config, output=output, callers=callers))
            peers = join(world, redis)
            stack.push_async_callback(peers.close)
            started.append((world, peers))
        yield started


async def begin(world: EdgeWorld, stop_after: int) -> tuple[ResumingClient, FakeRequest]:
    """Returns a stream that has lost its connection after that many events, the opening and tokens, and its request."""
    streamed = client(world)
    reading = asyncio.create_task(streamed.begin(chat_body(stream=True), stop_after=stop_after))
    request = await world.link.next_request()
    request.start()
    for i in range(stop_after - 1):
        request.tokens(f"{i} ")
    await reading
    await eventually(lambda: not world.edge.resume.streams[streamed.response_id].is_attended)
    return streamed, request


async def published(peers: EdgeMembership) -> None:
    await peers._publisher.flush()


async def die(world: EdgeWorld, peers: EdgeMembership) -> None:
    """Stop as kill -9 does: nothing is sent to Redis or to clients, and the port is closed."""
    task = peers._publisher._task
    assert task is not None
    peers._publisher._stopping.set()
    peers._publisher.gate.wake.set()
    peers._publisher._flush = nothing
    await task
    peers._publisher._task = None
    world.edge.resume.publish_with(peers._publisher.gate, lambda _: None)
    await world.server.stop()


async def left_by_a_dead_edge(redis: RedisConfig) -> tuple[ResumingClient, int]:
    """Returns a client that has read an answer to its end, and the port of the edge that had it."""
    async with edge_world() as world:
        peers = join(world, redis)
        world.link.script = answer("Hel", "lo")
        whole = client(world)
        await whole.begin(chat_body(stream=True))
        await published(peers)
        await die(world, peers)
        await peers.close()
    return whole, world.address[1]


async def nothing() -> None:
    pass
