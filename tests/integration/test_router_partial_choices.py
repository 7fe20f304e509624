"""`Generate` with `partial_choices` resumes an answer that another router has begun, and `Cancel` settles it there."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, SamplingParams, StopConditions
from kvloom.v1.router_service_pb2 import CancelRequest, GenerateRequest, GenerateResponse, PartialChoice, TokenIds
from tests.fakes.fake_shard import expected_text, expected_tokens
from tests.fakes.generate_stream import PROMPT, TOKEN, Stream, metered, start
from tests.fakes.router_world import MODEL, RouterWorld
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

SEEDED = SamplingParams(seed=7)


def partial_choices(index: int, count: int, **fields: Any) -> PartialChoice:
    """Returns a choice of which the client has received `count` tokens and their text."""
    token_ids = expected_tokens(PROMPT, index, count)
    chars = len(expected_text(PROMPT, index, count))
    return PartialChoice(**{"index": index, "token_ids": token_ids, "num_delivered_chars": chars, **fields})


async def collect(world: RouterWorld, **fields: Any) -> list[GenerateResponse]:
    stop = StopConditions(max_tokens=30)
    defaults = {"model": MODEL, "token_ids": TokenIds(ids=PROMPT), "stop": stop, "sampling": SEEDED}
    request = GenerateRequest(**{**defaults, **fields})
    return [response async for response in (await world.stub()).Generate(request)]


@pytest.mark.parametrize("resumable", [False, True])
async def test_choices_resume_behind_the_received_tokens(world: RouterWorld, resumable: bool) -> None:
    """One choice is resumed in its middle, one starts from its beginning, one is done. Only new tokens are metered."""
    await start(world)
    given = [partial_choices(0, 12), partial_choices(1, 0, done=True)]
    responses = await collect(
        world, n=3, partial_choices=given, resumable=resumable, starting_after=40 if resumable else 0
    )
    deltas = [delta for response in responses for delta in response.deltas]
    by_index = {i: [d for d in deltas if d.index == i] for i in range(3)}
    assert [t for d in by_index[0] for t in d.token_ids] == expected_tokens(PROMPT, 0, 30)[12:]
    assert not by_index[1]
    assert [t for d in by_index[2] for t in d.token_ids] == expected_tokens(PROMPT, 2, 30)
    assert [by_index[i][-1].finish.num_output_tokens for i in (0, 2)] == [30, 30]
    assert metered(world) == (1, 18 + 30)
    numbers = [response.event_number for response in responses]
    assert numbers == ([*range(41, 41 + len(responses))] if resumable else [0] * len(responses))


async def test_an_answer_of_which_only_the_end_is_missing(world: RouterWorld) -> None:
    """If all tokens have been received the answer just ends, and no tokens are metered."""
    await start(world)
    (response,) = await collect(world, partial_choices=[partial_choices(0, 30)])
    (delta,) = response.deltas
    assert (delta.finish.reason, delta.finish.num_output_tokens) == (FINISH_REASON_LENGTH, 30)
    assert not delta.token_ids
    assert metered(world) == (1, 0)


async def test_a_resumed_answer_continues_its_event_numbers(world: RouterWorld) -> None:
    """`Resume` at the second router takes event numbers that the client has counted since the first router."""
    await start(world)
    stream = Stream(world, partial_choices=[partial_choices(0, 5)], sampling=SEEDED, starting_after=4)
    await stream.begin()
    await stream.read_to_end()
    whole = list(stream.responses)
    assert whole[0].event_number == 5
    stream.responses = [GenerateResponse()] * 4 + whole[:3]
    await stream.resume()
    await stream.read_to_end()
    assert stream.responses[4:] == whole
    await stream.resume(3)
    assert (await stream.error()).reason_name == "EVENTS_GONE"


async def test_the_first_response_has_the_seed(world: RouterWorld) -> None:
    """The first response contains the seed that was given or drawn, without which an answer cannot be resumed."""
    await start(world)
    for resumable in (False, True):
        first, *others = await collect(world, sampling=SamplingParams(seed=2**64 - 1), resumable=resumable)
        assert first.seed == 2**64 - 1
        assert not any(response.HasField("seed") for response in others)
        drawn = {(await collect(world, sampling=None, resumable=resumable))[0].seed for _ in range(2)}
        assert len(drawn) == 2


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"partial_choices": [partial_choices(1, 3)]}, "partial_choices[0].index"),
        ({"partial_choices": [partial_choices(0, 3), partial_choices(0, 3)]}, "partial_choices[1].index"),
        ({"partial_choices": [partial_choices(0, 31)]}, "partial_choices[0].token_ids"),
        ({"partial_choices": [partial_choices(0, 1, token_ids=[100_000])]}, "partial_choices[0].token_ids"),
        ({"partial_choices": [partial_choices(0, 0, done=True)]}, "partial_choices"),
        ({"partial_choices": [partial_choices(0, 3)], "sampling": SamplingParams(temperature=0.5)}, "sampling.seed"),
    ],
)
async def test_impossible_partial_choices_are_rejected(
    world: RouterWorld, fields: dict[str, Any], field: str, resumable: bool
) -> None:
    """The error names the field, and nothing is generated."""
    await start(world)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(world, resumable=resumable, **fields)
    error = from_rpc_error(caught.value)
    assert (error.reason_name, error.field) == ("INVALID_ARGUMENT", field)
    assert metered(world) == (0, 0)


async def test_starting_after_needs_partial_choices(world: RouterWorld) -> None:
    """An answer from its beginning has no earlier responses, and no answer has 2^64 of them."""
    await start(world)
    for fields in ({}, {"partial_choices": [partial_choices(0, 1)], "starting_after": 2**64 - 1}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(world, **{"resumable": True, "starting_after": 3, **fields})
        assert from_rpc_error(caught.value).field == "starting_after"


async def test_greedy_answers_need_no_seed(world: RouterWorld) -> None:
    """Greedy sampling draws no random numbers."""
    await start(world)
    assert await collect(world, partial_choices=[partial_choices(0, 3)], sampling=SamplingParams(temperature=0.0))


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_running_call_is_settled(world: RouterWorld, resumable: bool) -> None:
    """The client has received 3 tokens and resumed elsewhere: the call ends, and tokens metered beyond are credited
    once. Only callers that know the call's token can do this."""
    shard = await start(world)
    stream = Stream(world, resumable=resumable, stop=StopConditions(max_tokens=4000))
    await stream.begin()
    await stream.read(10)
    stub = await world.stub()
    wrong = CancelRequest(request_id="mine", resume_token=TOKEN + "x", num_received_tokens=0)
    assert not (await stub.Cancel(wrong)).found
    assert shard.num_running
    right = CancelRequest(request_id="mine", resume_token=TOKEN, num_received_tokens=3)
    assert (await stub.Cancel(right)).found
    await eventually(lambda: not shard.num_running, "the sequence's end")
    assert not (await stub.Cancel(right)).found
    assert metered(world)[1] - credited(world) == 3
    stream.drop()


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_call_is_settled_after_its_end(world: RouterWorld, resumable: bool) -> None:
    """The call's end was lost on the way, too. Without a count nothing is credited."""
    await start(world)
    stream = Stream(world, resumable=resumable)
    await stream.begin()
    await stream.read_to_end()
    stub = await world.stub()
    await eventually(lambda: metered(world) == (1, 30), "the usage record")
    await stub.Cancel(CancelRequest(request_id="mine", resume_token=TOKEN))
    assert not credited(world)
    assert (await stub.Cancel(CancelRequest(request_id="mine", resume_token=TOKEN, num_received_tokens=12))).found
    assert credited(world) == 18


def credited(world: RouterWorld) -> float:
    return world.metric("kvloom_router_tokens_credited_total", model=MODEL)
