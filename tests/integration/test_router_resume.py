"""`Generate` with `resumable` and `Resume`: whatever breaks, a client ends up with every response once, and is billed
once."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from kvloom.client import Client
from kvloom.config import ResumeConfig
from kvloom.errors import KvloomError
from kvloom.grpc_errors import from_rpc_error
from kvloom.v1.generation_pb2 import StopConditions
from kvloom.v1.router_service_pb2 import CancelRequest, GenerateRequest, GenerateResponse, ResumeRequest, TokenIds
from router.core.core import RouterCore
from router.core_config import core_config
from router.server import RouterServer
from tests.fakes.breaking_proxy import BreakingProxy
from tests.fakes.fake_shard import FakeShard, expected_text, expected_tokens
from tests.fakes.router_world import MODEL, TIMEOUT_SECONDS, RouterWorld, eventually
from tests.fakes.tiny_tokenizer import model_tokenizer

pytest_plugins = ("tests.fakes.router_fixtures",)

TOKEN = "a-secret-of-my-own"
PROMPT = [3, 4]


async def start(world: RouterWorld, shard_options: dict[str, Any] | None = None, **resume: Any) -> FakeShard:
    world.config.router.resume = ResumeConfig(**{"grace_seconds": 10.0, **resume})
    shard = await world.start_shard("shard-0", **(shard_options or {"step_seconds": 0.002}))
    await world.start_router()
    await world.wait_for_shards(await world.connect(), 1)
    return shard


def wanted(max_tokens: int = 30, **fields: Any) -> GenerateRequest:
    defaults = {"model": MODEL, "token_ids": TokenIds(ids=PROMPT), "request_id": "mine", "resumable": True}
    return GenerateRequest(**{**defaults, "stop": StopConditions(max_tokens=max_tokens), **fields})


class Stream:
    """A client of one answer, which loses its RPC as often as the test wants."""

    def __init__(self, world: RouterWorld, **fields: Any) -> None:
        self._world = world
        self.request = wanted(**{"resume_token": TOKEN, **fields})
        self.metadata: tuple[tuple[str, str], ...] = ()
        self.responses: list[GenerateResponse] = []
        self.call: Any = None

    async def begin(self) -> None:
        self.call = (await self._world.stub()).Generate(self.request, metadata=self.metadata)

    async def resume(self, after: int | None = None, token: str = "") -> None:
        after = len(self.responses) if after is None else after
        del self.responses[after:]
        asked = ResumeRequest(
            request_id=self.request.request_id,
            resume_token=token or self.request.resume_token,
            starting_after=after,
        )
        self.call = (await self._world.stub()).Resume(asked, metadata=self.metadata)

    async def read(self, count: int) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            for _ in range(count):
                message = await self.call.read()
                assert message is not grpc.aio.EOF
                self.responses.append(getattr(message, "response", message))

    async def read_to_end(self) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self.responses.append(getattr(message, "response", message))

    async def error(self) -> KvloomError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.read_to_end()
        return from_rpc_error(caught.value)

    def drop(self) -> None:
        self.call.cancel()

    @property
    def token_ids(self) -> list[int]:
        return [i for response in self.responses for delta in response.deltas for i in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for response in self.responses for delta in response.deltas)

    def check_whole(self, max_tokens: int = 30) -> None:
        assert self.token_ids == expected_tokens(PROMPT, 0, max_tokens)
        assert self.text == expected_text(PROMPT, 0, max_tokens)
        assert [response.event_number for response in self.responses] == list(range(1, len(self.responses) + 1))
        assert {response.request_id for response in self.responses} == {"mine"}
        assert self.responses[-1].deltas[0].finish.num_output_tokens == max_tokens


def billed(world: RouterWorld) -> tuple[float, float]:
    """(requests that ended, output tokens)"""
    tokens = world.metric("kvloom_router_tokens_total", gen_ai_request_model=MODEL, gen_ai_token_type="output")
    outcomes = ("length", "cancelled", "error")
    ended = sum(
        sample.value
        for metric in world.metrics.collect()
        for sample in metric.samples
        if sample.name == "kvloom_router_requests_total" and sample.labels["outcome"] in outcomes
    )
    return ended, tokens


async def test_a_dropped_stream_goes_on_where_it_was(world: RouterWorld) -> None:
    """The missed responses as they were, then those that come; again and again, and billed once."""
    await start(world)
    stream = Stream(world)
    await stream.begin()
    for count in (1, 4, 2, 7):
        await stream.read(count)
        stream.drop()
        await stream.resume()
    await stream.read_to_end()
    stream.check_whole()
    assert stream.responses[0].resume_token == TOKEN
    assert not any(response.resume_token for response in stream.responses[1:])
    assert billed(world) == (1, 30)
    assert world.metric("kvloom_router_resumed_streams_total") == 4


async def test_the_replay_is_the_same_however_often(world: RouterWorld) -> None:
    """From any position, during the answer and after its end: byte for byte what the first reader got."""
    await start(world)
    stream = Stream(world)
    await stream.begin()
    await stream.read_to_end()
    whole = [response.SerializeToString() for response in stream.responses]
    for after in (0, 1, 12, len(whole)):
        await stream.resume(after)
        await stream.read_to_end()
        assert [response.SerializeToString() for response in stream.responses] == whole
    assert billed(world) == (1, 30)


async def test_a_stream_that_breaks_before_its_first_response_is_resumable(world: RouterWorld) -> None:
    """The id and the token are in the initial metadata, before the engine has done anything."""
    shard = await start(world)
    shard.pause()
    stream = Stream(world, resume_token="", request_id="")
    await stream.begin()
    metadata = dict(await asyncio.wait_for(stream.call.initial_metadata(), TIMEOUT_SECONDS))
    stream.drop()
    assert metadata["kvloom-router"] == "router-0"
    stream.request.request_id = metadata["kvloom-request-id"]
    stream.request.resume_token = metadata["kvloom-resume-token"]
    await stream.resume()
    shard.resume()
    await stream.read_to_end()
    assert stream.token_ids == expected_tokens(PROMPT, 0, 30)
    assert stream.responses[0].resume_token == metadata["kvloom-resume-token"]


async def test_a_request_whose_client_never_heard_of_it_ends_at_once(world: RouterWorld) -> None:
    """Nobody can come back to an answer whose drawn token was never sent; with a token of its own a client can."""
    await start(world)
    stream = Stream(world)
    await stream.begin()
    await eventually(lambda: world.metric("kvloom_router_resumable_answers") == 1, "the request")
    stream.drop()
    await stream.resume(0)
    await stream.read_to_end()
    stream.check_whole()


async def test_only_the_same_caller_may_resume(world: RouterWorld) -> None:
    """Another key, another token, another id: the very answer that an unknown stream gets."""
    await start(world)
    stream = Stream(world)
    stream.metadata = (("authorization", "Bearer mine"),)
    await stream.begin()
    await stream.read(2)
    stream.drop()
    told = []
    for metadata, token in (
        ((("authorization", "Bearer theirs"),), ""),
        ((), ""),
        (stream.metadata, "another-secret-of-16"),
    ):
        thief = Stream(world)
        thief.metadata = metadata
        await thief.resume(0, token)
        told.append(await thief.error())
    unknown = Stream(world, request_id="nobody's")
    await unknown.resume(0)
    told.append(await unknown.error())
    assert {error.reason_name for error in told} == {"NOT_FOUND"}
    assert len({error.message for error in told}) == 1
    await stream.resume()
    await stream.read_to_end()
    stream.check_whole()


async def test_another_router_says_where_to_go(world: RouterWorld) -> None:
    """Streams live in the router that began them: a token that it drew names it."""
    await start(world)
    stream = Stream(world)
    await stream.resume(0, "router-7.0123456789abcdef")
    error = await stream.error()
    assert error.reason_name == "NOT_FOUND"
    assert "this is router 'router-0', the token is of router 'router-7'" in error.message


async def test_without_its_client_an_answer_ends_after_the_grace_period(world: RouterWorld) -> None:
    """An engine works for nobody no longer than that; what was generated until then is billed, once."""
    shard = await start(world, grace_seconds=0.2)
    stream = Stream(world, max_tokens=4000)
    await stream.begin()
    await stream.read(2)
    stream.drop()
    await eventually(lambda: shard.cancelled_slots and not shard.num_running, "the cancel")
    await stream.resume()
    assert (await stream.error()).reason_name == "NOT_FOUND"
    ended, tokens = billed(world)
    assert ended == 1
    assert tokens >= 2
    assert world.metric("kvloom_router_expired_answers_total") == 1
    assert world.metric("kvloom_router_resume_bytes") == 0


@pytest.mark.parametrize(("grace_seconds", "resumable"), [(0.0, True), (10.0, False), (10.0, None)])
async def test_what_is_not_resumable_is_cancelled_at_once(
    world: RouterWorld, grace_seconds: float, resumable: bool | None
) -> None:
    """Most clients that break off mean it: resuming is for those that ask, where it is switched on."""
    shard = await start(world, grace_seconds=grace_seconds)
    stream = Stream(world, max_tokens=4000, resumable=resumable)
    await stream.begin()
    await stream.read(2)
    assert stream.responses[0].event_number == 0
    stream.drop()
    await eventually(lambda: shard.cancelled_slots and not shard.num_running, "the cancel")


async def test_by_default_can_be_set(world: RouterWorld) -> None:
    """An operator may make all streams resumable; a client may still say no."""
    await start(world, by_default=True)
    for resumable, numbered in ((None, True), (False, False)):
        stream = Stream(world, resumable=resumable, request_id=f"{resumable}")
        await stream.begin()
        await stream.read_to_end()
        assert bool(stream.responses[0].event_number) is numbered


async def test_what_is_no_longer_kept_is_an_error_not_a_gap(world: RouterWorld) -> None:
    """Buffers are bounded: who asks for what is gone is told, and the engine does not work on for nobody."""
    shard = await start(world, max_response_bytes=4096)
    stream = Stream(world, max_tokens=2000)
    await stream.begin()
    await stream.read(2)
    stream.drop()
    await eventually(lambda: shard.cancelled_slots and not shard.num_running, "the cancel")
    kept = Stream(world, max_tokens=200, request_id="other")
    await kept.begin()
    await kept.read_to_end()
    await kept.resume(1)
    assert (await kept.error()).reason_name == "EVENTS_GONE"
    num_responses = len(expected_tokens(PROMPT, 0, 200))
    await kept.resume(0)
    error = await kept.error()
    assert error.reason_name == "EVENTS_GONE"
    assert error.kind.grpc_code == "OUT_OF_RANGE"
    kept.responses = [GenerateResponse()] * (num_responses - 2)
    await kept.resume()
    await kept.read_to_end()
    assert kept.responses[-1].deltas[0].finish.num_output_tokens == 200
    await kept.resume(0, "x" * 20)
    assert (await kept.error()).reason_name == "NOT_FOUND"


async def test_all_answers_together_are_bounded(world: RouterWorld) -> None:
    """The oldest ended ones make way."""
    await start(world, max_bytes=64 * 1024)
    for number in range(12):
        stream = Stream(world, max_tokens=100, request_id=f"number-{number}")
        await stream.begin()
        await stream.read_to_end()
        assert world.metric("kvloom_router_resume_bytes") <= 64 * 1024
    assert world.metric("kvloom_router_evicted_answers_total") > 0
    await stream.resume(0)
    await stream.read_to_end()
    assert stream.token_ids == expected_tokens(PROMPT, 0, 100)


async def test_the_later_reader_takes_over(world: RouterWorld) -> None:
    """A router is often the last to learn that a connection is dead."""
    await start(world, {"step_seconds": 0.01})
    first, second = Stream(world), Stream(world)
    await first.begin()
    await first.read(3)
    await second.resume(0)
    assert (await first.error()).reason_name == "STREAM_TAKEN_OVER"
    await second.read_to_end()
    second.check_whole()
    assert billed(world) == (1, 30)


async def test_a_position_that_was_never_reached_is_refused(world: RouterWorld) -> None:
    """A client that counts wrong must hear of it."""
    await start(world)
    stream = Stream(world)
    await stream.begin()
    await stream.read_to_end()
    stream.responses *= 3
    await stream.resume()
    error = await stream.error()
    assert (error.reason_name, error.field) == ("INVALID_ARGUMENT", "starting_after")


@pytest.mark.parametrize("token", ["short", "x" * 257, "é" * 20, "a\nnewline-in-a-token"])
async def test_a_token_that_is_no_secret_is_refused(world: RouterWorld, token: str) -> None:
    """What binds a stream to its client must not be guessable, and fit into metadata."""
    await start(world)
    stream = Stream(world, resume_token=token)
    await stream.begin()
    error = await stream.error()
    assert (error.reason_name, error.field) == ("INVALID_ARGUMENT", "resume_token")


async def test_a_refused_request_leaves_nothing_behind(world: RouterWorld) -> None:
    """The same request may succeed when it is made again."""
    await start(world)
    stream = Stream(world, model="gpt-9", request_id="né ", n=3)
    await stream.begin()
    assert (await stream.error()).reason_name == "MODEL_NOT_FOUND"
    assert world.metric("kvloom_router_resumable_answers") == 0
    again = Stream(world)
    await again.begin()
    await again.read_to_end()
    again.check_whole()


async def test_a_name_that_is_kept_is_resumed_not_begun_again(world: RouterWorld) -> None:
    """A client that repeats Generate must not pay for the answer twice."""
    await start(world)
    stream = Stream(world)
    await stream.begin()
    await stream.read_to_end()
    again = Stream(world)
    await again.begin()
    assert (await again.error()).reason_name == "DUPLICATE_REQUEST_ID"
    assert billed(world) == (1, 30)


async def test_an_error_is_replayed_like_the_rest(world: RouterWorld) -> None:
    """An answer that fails after its client has left ends for it as it would have."""
    await start(world, {"step_seconds": 0.005})
    stream = Stream(world, max_tokens=4000, timeout_seconds=0.3)
    await stream.begin()
    await stream.read(3)
    stream.drop()
    await eventually(lambda: billed(world)[0] == 1, "the end")
    for _ in range(2):
        await stream.resume(3)
        assert (await stream.error()).reason_name == "DEADLINE_EXCEEDED"
    assert stream.token_ids == expected_tokens(PROMPT, 0, len(stream.token_ids))
    assert billed(world) == (1, len(stream.token_ids))


async def test_cancel_ends_it_without_grace(world: RouterWorld) -> None:
    """A client that has gone for good can say so."""
    shard = await start(world)
    stream = Stream(world, max_tokens=4000)
    await stream.begin()
    await stream.read(2)
    stream.drop()
    assert (await (await world.stub()).Cancel(CancelRequest(request_id="mine"))).found
    await eventually(lambda: not shard.num_running, "the cancel")
    await stream.resume()
    await stream.read_to_end()
    assert stream.responses[-1].deltas[0].finish.num_output_tokens == len(stream.token_ids)


async def test_a_router_that_stops_ends_what_it_keeps(world: RouterWorld) -> None:
    """Draining waits for answers; what is left then ends with a reason, not with a broken connection."""
    world.config.router.drain_timeout_seconds = 0.2
    await start(world)
    attended, left = Stream(world, max_tokens=4000), Stream(world, max_tokens=4000, request_id="left")
    for stream in (attended, left):
        await stream.begin()
        await stream.read(2)
    left.drop()
    world.stop.set()
    assert (await attended.error()).reason_name == "DRAINING"
    assert world.served is not None
    await asyncio.wait_for(world.served, TIMEOUT_SECONDS)
    assert world.metric("kvloom_router_resumable_answers") == 0


async def test_n_answers_resume_together(world: RouterWorld) -> None:
    """All choices of a request are in one stream: none may lose its place."""
    await start(world)
    stream = Stream(world, n=3)
    await stream.begin()
    await stream.read(4)
    stream.drop()
    await stream.resume()
    await stream.read_to_end()
    for index in range(3):
        deltas = [delta for response in stream.responses for delta in response.deltas if delta.index == index]
        assert [i for delta in deltas for i in delta.token_ids] == expected_tokens(PROMPT, index, 30)
    assert billed(world) == (1, 90)


# -- the SDK ----------------------------------------------------------------------------------------------------------


async def test_the_sdk_mends_lost_connections(world: RouterWorld) -> None:
    """The user's `async for` sees no break, however often the connection is reset; nothing is lost, doubled or billed
    twice, also while a shard dies."""
    await start(world, {"step_seconds": 0.004})
    await world.start_shard("shard-1", step_seconds=0.004)
    proxy = BreakingProxy(world.address)
    await proxy.start()
    rng = random.Random(5)

    async def ask(client: Client, number: int) -> None:
        prompt = [number, 1]
        deltas = [
            delta async for delta in client.generate(model=MODEL, token_ids=prompt, max_tokens=120, resumable=True)
        ]
        assert [i for delta in deltas for i in delta.token_ids] == expected_tokens(prompt, 0, 120)
        assert "".join(delta.text for delta in deltas) == expected_text(prompt, 0, 120)
        assert sum(delta.finish is not None for delta in deltas) == 1

    async with Client(proxy.address) as client, asyncio.timeout(4 * TIMEOUT_SECONDS):
        answers = [asyncio.create_task(ask(client, number)) for number in range(8)]
        while not all(answer.done() for answer in answers):
            await asyncio.sleep(rng.uniform(0.02, 0.15))
            proxy.reset()
        await asyncio.gather(*answers)
    await proxy.stop()
    assert proxy.num_connections > 2
    assert billed(world) == (8, 8 * 120)


async def test_the_sdk_mends_a_connection_that_breaks_before_anything_was_heard(world: RouterWorld) -> None:
    """Whether or not the router has heard of the request, it is made once."""
    shard = await start(world)
    proxy = BreakingProxy(world.address)
    await proxy.start()
    async with Client(proxy.address) as client, asyncio.timeout(2 * TIMEOUT_SECONDS):
        for arrives in (False, True):
            proxy.refuse(not arrives)
            shard.pause()
            options: Any = {"model": MODEL, "token_ids": PROMPT, "max_tokens": 20, "resumable": True}
            answer = asyncio.create_task(_collect(client, **options))
            if arrives:
                await eventually(lambda: shard.num_running, "the request")
            else:
                await eventually(lambda: proxy.num_connections > 2, "some attempts")
            proxy.reset()
            proxy.refuse(False)
            shard.resume()
            assert await answer == expected_tokens(PROMPT, 0, 20)
    await proxy.stop()
    assert billed(world) == (2, 40)


async def test_the_sdk_cancels_what_it_leaves(world: RouterWorld) -> None:
    """Leaving the loop means the end, not a grace period."""
    shard = await start(world)
    async with Client(world.address) as client:
        answer = client.generate(model=MODEL, token_ids=PROMPT, max_tokens=4000, resumable=True)
        async for _ in answer:
            break
        await answer.aclose()
        await eventually(lambda: shard.cancelled_slots and not shard.num_running, "the cancel")


async def test_the_sdk_says_when_an_answer_is_lost(world: RouterWorld) -> None:
    """A router that does not know the answer any more: an error, never a second, different answer."""
    await start(world, {"step_seconds": 0.01}, grace_seconds=0.05)
    proxy = BreakingProxy(world.address)
    await proxy.start()
    async with Client(proxy.address) as client:
        options: Any = {"model": MODEL, "token_ids": PROMPT, "max_tokens": 4000, "resumable": True}
        answer = client.generate(**options)
        async for _ in answer:
            break
        proxy.refuse(True)
        proxy.reset()
        asyncio.get_running_loop().call_later(0.3, proxy.refuse, False)
        with pytest.raises(KvloomError) as caught:
            _ = [delta async for delta in answer]
    assert caught.value.reason_name == "ROUTER_LOST"
    assert "no longer kept" in caught.value.message
    await proxy.stop()


async def _collect(client: Client, **options: Any) -> list[int]:
    return [i async for delta in client.generate(**options) for i in delta.token_ids]


async def test_the_sdk_finds_the_router_among_several_at_one_address(world: RouterWorld) -> None:
    """Routers may share a port: a new connection ends at any of them, and the answer is at one."""
    await start(world, {"step_seconds": 0.005})
    config = copy.deepcopy(world.config)
    config.redis.key_prefix += "-other"  # a fake shard serves one router
    other = RouterServer(config, RouterCore(core_config(config)), model_tokenizer(), "router-1", CollectorRegistry())
    stop = asyncio.Event()
    address = await other.start("127.0.0.1", 0)
    serving = asyncio.create_task(other.serve(stop))
    proxy = BreakingProxy(world.address)
    await proxy.start()
    async with Client(proxy.address) as client, asyncio.timeout(2 * TIMEOUT_SECONDS):
        token_ids: list[int] = []
        async for delta in client.generate(model=MODEL, token_ids=PROMPT, max_tokens=60, resumable=True):
            if not token_ids:
                proxy.redirect(address)
                proxy.reset()
            token_ids += delta.token_ids
    assert token_ids == expected_tokens(PROMPT, 0, 60)
    assert billed(world) == (1, 60)
    await proxy.stop()
    stop.set()
    await asyncio.wait_for(serving, TIMEOUT_SECONDS)


async def test_the_sdk_asks_another_router_for_an_answer_that_has_not_begun(world: RouterWorld) -> None:
    """A router that is not there costs a moment, no answer."""
    await start(world)
    proxy = BreakingProxy(world.address)
    await proxy.start()
    proxy.refuse(True)
    async with Client([proxy.address, world.address]) as client, asyncio.timeout(2 * TIMEOUT_SECONDS):
        options: Any = {"model": MODEL, "token_ids": PROMPT, "max_tokens": 20, "resumable": True}
        assert await _collect(client, **options) == expected_tokens(PROMPT, 0, 20)
    await proxy.stop()
