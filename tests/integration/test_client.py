"""The SDK against a router on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import kvloom
from kvloom.client.client import Client
from kvloom.errors import KvloomError
from kvloom.v1 import generation_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from tests.fakes.fake_router import TIMEOUT_SECONDS, FakeRouter, serve_fake_router, text_of

R = ErrorReason
FILTERED = KvloomError(R.ERROR_REASON_CONTENT_FILTERED, "Not allowed.")


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    async with serve_fake_router() as (fake, address):
        fake.address = address
        yield fake


@pytest.fixture
async def client(router: FakeRouter) -> AsyncIterator[Client]:
    async with Client(router.address, client_id="sdk", reattach_seconds=0.3, max_retries=0) as client:
        yield client


async def test_token_ids_travel_over_the_shared_stream(client: Client, router: FakeRouter) -> None:
    """Two requests, one connection, no Generate RPC; every token once, start first and finish last."""
    for ids in ([1, 2, 3], [4]):
        deltas = [d async for d in client.generate(model="m", token_ids=ids, logprobs=0, session_key="chat-17")]
        assert [i for delta in deltas for i in delta.token_ids] == ids
        assert "".join(delta.text for delta in deltas) == "".join(map(text_of, ids))
        assert [entry.logprob for delta in deltas for entry in delta.logprobs] == [-float(i) for i in range(len(ids))]
        assert deltas[0].start is not None
        assert deltas[0].start.shard_id == "shard-0"
        assert deltas[-1].finish is not None
        assert deltas[-1].finish.num_output_tokens == len(ids)
    assert len(router.connections) == 1
    assert {submit.request.session_key for submit in router.connections[0].submits} == {"chat-17"}
    assert not router.generate_requests


async def test_messages_and_text_are_sent_to_be_tokenized(client: Client, router: FakeRouter) -> None:
    """Without its own tokenizer, the SDK leaves tokenizing to the router; all options arrive."""
    messages = [kvloom.ChatMessage("system", "be brief"), {"role": "user", "content": "hi there"}]
    options = {"max_tokens": 5, "temperature": 0.5, "seed": 7, "stop": "END", "n": 2, "timeout_seconds": 3.0}
    options["session_key"] = "chat-17"
    deltas = [delta async for delta in client.generate(model="m", messages=messages, request_id="mine", **options)]
    assert [delta.text for delta in deltas if delta.index == 1] == ["be", "brief", "hi", "there", ""]
    request = router.generate_requests[0]
    assert (request.request_id, request.session_key) == ("mine", "chat-17")
    assert [message.role for message in request.conversation.messages] == ["system", "user"]
    assert (request.stop.max_tokens, list(request.stop.stop)) == (5, ["END"])
    assert (request.sampling.temperature, request.sampling.seed, request.n) == (0.5, 7, 2)
    assert not request.sampling.HasField("top_p")
    assert [delta.text async for delta in client.generate(model="m", text="a b", stop=["x", "y"])] == ["a", "b", ""]
    assert router.generate_requests[1].request_id


async def test_leaving_the_loop_cancels_the_request(client: Client, router: FakeRouter) -> None:
    """No generation continues for a caller that has left, over either path to the router."""
    router.answers = False
    stream = client.generate(model="m", token_ids=[1], n=2)
    task = asyncio.create_task(anext(stream))
    await router.wait_until(lambda: bool(router.connections) and bool(router.connections[0].submits))
    connection = router.connections[0]
    slots = [choice.slot for choice in connection.submits[0].choices]
    router.tokens(connection, (slots[0], [7]))
    assert (await task).token_ids == [7]
    await stream.aclose()
    await router.wait_until(lambda: sorted(connection.cancelled_slots) == sorted(slots))

    async for delta in client.generate(model="m", text="word"):
        assert delta.text == "word"
        break
    await router.wait_until(lambda: router.cancelled_rpcs == 1)


async def test_a_failed_choice_raises_its_reason(client: Client, router: FakeRouter) -> None:
    """The same fault reads the same over the stream and over the RPC."""
    router.fail_with = KvloomError(R.ERROR_REASON_QUEUE_FULL, "Full.", retry_after_seconds=2)
    for prompt in ({"token_ids": [1]}, {"text": "hi"}):
        with pytest.raises(KvloomError, match="Full") as caught:
            async for _ in client.generate(model="m", **prompt):
                pass
        assert caught.value.reason == R.ERROR_REASON_QUEUE_FULL
        assert caught.value.retry_after_seconds == 2


async def test_one_failed_choice_does_not_hide_the_others(client: Client, router: FakeRouter) -> None:
    """With n > 1 the reader gets all deltas up to the error, and then the error."""
    router.answers = False
    stream = client.generate(model="m", token_ids=[1], n=2)
    task = asyncio.create_task(collect(stream))
    await router.wait_until(lambda: bool(router.connections) and bool(router.connections[0].submits))
    connection = router.connections[0]
    slots = [choice.slot for choice in connection.submits[0].choices]
    router.finish(connection, slots[0], error=KvloomError(R.ERROR_REASON_SHARD_LOST, "Lost."))
    router.tokens(connection, (slots[1], [3]))
    router.finish(connection, slots[1])
    deltas, error = await task
    assert [(delta.index, list(delta.token_ids)) for delta in deltas if delta.token_ids] == [(1, [3])]
    assert error is not None
    assert error.reason == R.ERROR_REASON_SHARD_LOST


async def collect(stream) -> tuple[list[kvloom.Delta], KvloomError | None]:
    deltas: list[kvloom.Delta] = []
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            async for delta in stream:
                deltas.append(delta)  # noqa: PERF401  (what came before the error counts)
    except KvloomError as error:
        return deltas, error
    return deltas, None


async def test_a_halted_answer_is_an_answer(client: Client, router: FakeRouter) -> None:
    """The safety policy's halt is a finish reason, as in OpenAI's API, not an exception."""
    router.answers = False
    task = asyncio.create_task(collect(client.generate(model="m", token_ids=[1])))
    await router.wait_until(lambda: bool(router.connections) and bool(router.connections[0].submits))
    connection = router.connections[0]
    slot = connection.submits[0].choices[0].slot
    router.tokens(connection, (slot, [1]))
    router.finish(connection, slot, generation_pb2.FINISH_REASON_CONTENT_FILTER, error=FILTERED)
    deltas, error = await task
    assert error is None
    assert deltas[-1].finish is not None
    assert deltas[-1].finish.reason == generation_pb2.FINISH_REASON_CONTENT_FILTER


async def test_a_refused_prompt_is_an_error(client: Client, router: FakeRouter) -> None:
    """Over the stream it arrives as a finish, over the RPC as a status; callers get the same error."""
    router.answers = False
    task = asyncio.create_task(collect(client.generate(model="m", token_ids=[1])))
    await router.wait_until(lambda: bool(router.connections) and bool(router.connections[0].submits))
    connection = router.connections[0]
    slot = connection.submits[0].choices[0].slot
    router.finish(connection, slot, generation_pb2.FINISH_REASON_CONTENT_FILTER, error=FILTERED)
    _, error = await task
    assert error is not None
    assert error.reason == R.ERROR_REASON_CONTENT_FILTERED


async def test_a_slow_reader_is_cancelled_with_an_error(router: FakeRouter) -> None:
    """Deltas that wait for a reader are bounded; the other requests of the stream continue."""
    router.answers = False
    async with Client(router.address, max_buffered_tokens=10) as client:
        slow = client.generate(model="m", token_ids=[1])
        task = asyncio.create_task(anext(slow))
        await router.wait_until(lambda: bool(router.connections) and bool(router.connections[0].submits))
        connection = router.connections[0]
        slot = connection.submits[0].choices[0].slot
        router.tokens(connection, (slot, [1]))
        await task
        for i in range(4):
            router.tokens(connection, (slot, [i] * 5))
        await router.wait_until(lambda: connection.cancelled_slots == [slot])
        with pytest.raises(KvloomError) as caught:
            await anext(slow)
        assert caught.value.reason == R.ERROR_REASON_CLIENT_TOO_SLOW
        router.answers = True
        assert [i async for d in client.generate(model="m", token_ids=[8]) for i in d.token_ids] == [8]


async def test_a_lost_router_is_an_error_with_a_reason(router: FakeRouter, client: Client) -> None:
    """ROUTER_LOST is raised mid-stream when the router does not continue the request, before the first connection, and
    for RPCs."""
    router.answers = False
    router.fleet.ClearField("models")  # what a router says that has come back and knows no shard
    task = asyncio.create_task(collect(client.generate(model="m", token_ids=[1])))
    await router.wait_until(lambda: bool(router.connections) and bool(router.connections[0].submits))
    router.connections[0].frames.put_nowait(None)
    _, error = await task
    assert error is not None
    assert error.reason == R.ERROR_REASON_ROUTER_LOST
    async with serve_fake_router() as (_, gone):
        pass
    async with Client(gone, connect_timeout_seconds=0.3, max_retries=0) as nobody:
        for prompt in ({"token_ids": [1]}, {"text": "hi"}):
            _, error = await collect(nobody.generate(model="m", **prompt))
            assert error is not None
            assert error.reason == R.ERROR_REASON_ROUTER_LOST
        with pytest.raises(KvloomError):
            await nobody.list_models()


async def test_plan_cancel_and_list_models(client: Client, router: FakeRouter) -> None:
    """The unary calls, and an error whose reason and field pass through a gRPC status."""
    assert (await client.plan(model="m", text="hi")).picked_shard_id == "shard-0"
    with pytest.raises(KvloomError) as caught:
        await client.plan(model="other", text="hi")
    assert (caught.value.reason, caught.value.field) == (R.ERROR_REASON_MODEL_NOT_FOUND, "model")
    assert await client.cancel("known")
    assert not await client.cancel("unknown")
    assert [model.name for model in await client.list_models()] == ["m"]
