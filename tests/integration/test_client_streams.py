"""What the SDK's users rely on besides the tokens: leaving a loop cancels, whole answers, retries, and how a cancel
ended."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import AsyncIterator

import pytest

from kvloom import CancelOutcome, Client, ErrorReason, FinishReason, GenerateOptions, KvloomError, SyncClient, Tier
from kvloom.client.retries import retry_pause_seconds
from kvloom.v1.router_service_pb2 import CancelRequest
from tests.fakes.fake_router import FakeRouter, serve_fake_router, text_of
from tests.fakes.router_world import MODEL, RouterWorld
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with serve_fake_router() as (fake, address):
        fake.address = address
        yield fake


@pytest.mark.parametrize("prompt", [{"token_ids": [1]}, {"text": "a"}])
@pytest.mark.parametrize("resumable", [False, True])
async def test_a_break_cancels_while_the_stream_is_referenced(
    world: RouterWorld, prompt: dict, resumable: bool
) -> None:
    """A variable that still refers to the stream must not keep an engine busy: the request ends although the reader
    does nothing more with the stream."""
    shard = await world.start_shard("shard-0", step_seconds=0.005)
    await world.start_router()
    await world.wait_for_shards(await world.connect(), 1)
    async with Client(world.address) as client:
        stream = client.generate(model=MODEL, max_tokens=4000, resumable=resumable, **prompt)
        async for delta in stream:
            assert delta.request_id == stream.request_id
            break
        await eventually(lambda: shard.num_running == 0, "the shard's cancel")
        assert [delta async for delta in stream] == []
        assert await client.cancel(stream.request_id) == CancelOutcome.ALREADY_ENDED


async def test_an_exception_and_a_dropped_stream_cancel(world: RouterWorld) -> None:
    """Whichever way the reader leaves, the request ends."""
    shard = await world.start_shard("shard-0", step_seconds=0.005)
    await world.start_router()
    await world.wait_for_shards(await world.connect(), 1)
    async with Client(world.address) as client:
        stream = client.generate(model=MODEL, max_tokens=4000, token_ids=[1])

        async def fail() -> None:
            async for _ in stream:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        await eventually(lambda: shard.num_running == 0, "the first cancel")
        dropped = client.generate(model=MODEL, max_tokens=4000, token_ids=[1])
        await anext(dropped)
        assert shard.num_running == 1
        del dropped
        await eventually(lambda: shard.num_running == 0, "the second cancel")


async def test_cancel_says_how_it_ended(world: RouterWorld) -> None:
    """A caller can tell a request that it stopped from one that had ended and from one that never was."""
    await world.start_shard("shard-0", step_seconds=0.005)
    await world.start_router()
    await world.wait_for_shards(await world.connect(), 1)
    async with Client(world.address) as client:
        stream = client.generate(model=MODEL, max_tokens=4000, text="a", request_id="mine")
        await anext(stream)
        assert await client.cancel("mine") is CancelOutcome.CANCELLED
        await stream.aclose()
        assert await client.cancel("mine") is CancelOutcome.ALREADY_ENDED
        assert not await client.cancel("other")
        assert await client.cancel("other") is CancelOutcome.NOT_FOUND
    assert not (await (await world.stub()).Cancel(CancelRequest(request_id="other"))).found


async def test_a_whole_answer(router: FakeRouter) -> None:
    """Most programs want the text and its counts, not the deltas."""
    async with Client(router.address) as client:
        answer = await client.complete(model="m", token_ids=[1, 2, 3], seed=7, n=2, tier=Tier.BATCH)
        assert answer.text == "".join(map(text_of, [1, 2, 3]))
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[0].token_ids == [1, 2, 3]
        assert (answer.finish_reason, answer.seed) == (FinishReason.STOP, 7)
        assert answer.num_output_tokens == 6
        assert answer.request_id.startswith("req-")


async def test_a_refused_request_is_repeated(router: FakeRouter) -> None:
    """The fleet's advice is followed, a few times, and only for errors that pass."""
    full = KvloomError(ErrorReason.QUEUE_FULL, "Full.", retry_after_seconds=0.01)
    for prompt in ({"token_ids": [1]}, {"text": "hi"}):
        async with Client(router.address) as client:
            router.fail_with = full
            num_before = len(router.generate_requests)
            with pytest.raises(KvloomError, match="Full") as caught:
                await client.complete(model="m", **prompt)
            if "text" in prompt:
                assert len(router.generate_requests) == num_before + 3
            router.fail_with = KvloomError(ErrorReason.INVALID_ARGUMENT, "Bad.", field="sampling.top_k")
            with pytest.raises(KvloomError) as caught:
                await client.complete(model="m", **prompt)
            assert caught.value.field == "top_k"
            router.fail_with = None
    assert retry_pause_seconds(KvloomError(ErrorReason.QUEUE_FULL, "", retry_after_seconds=61), 0) is None
    assert retry_pause_seconds(KvloomError(ErrorReason.DRAINING, ""), 9, lambda: 1.0) == 8.0


async def test_an_error_prints_what_a_user_needs(router: FakeRouter) -> None:
    """The reason, the field and the advice, and no traceback of gRPC in front of them."""
    router.fail_with = KvloomError(ErrorReason.QUEUE_FULL, "Full.", retry_after_seconds=2)
    async with Client(router.address, max_retries=0) as client:
        with pytest.raises(KvloomError) as caught:
            await client.complete(model="m", text="hi")
        with pytest.raises(KvloomError) as unary:
            await client.plan(model="other", text="hi")
    error = caught.value
    assert error.reason is ErrorReason.QUEUE_FULL
    assert str(error) == "Full. (QUEUE_FULL, retry after 2 s)"
    for shown in (error, unary.value):
        assert "AioRpcError" not in "".join(traceback.format_exception(shown))


@pytest.mark.parametrize("method", [Client.generate, Client.complete, Client.plan, SyncClient.generate])
def test_help_lists_the_options(method) -> None:
    """`help()` is where a new user looks; every option is there with its type and what it means."""
    parameters = inspect.signature(method).parameters
    assert set(GenerateOptions.__annotations__) <= set(parameters)
    assert parameters["model"].default is inspect.Parameter.empty
    for name in GenerateOptions.__annotations__:
        assert f"\n    {name}: " in method.__doc__
    assert "0 to 2; default 1. 0 is greedy." in method.__doc__
