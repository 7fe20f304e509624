"""The router's data plane over real sockets: every answer is checked by its content."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest

from kvloom.errors import reason_name
from kvloom.router_link.link import ChoiceProgress
from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1 import generation_pb2, router_service_pb2, router_service_pb2_grpc
from router.links.submit_queue import LONG_PROMPT_TOKENS
from tests.fakes.fake_shard import expected_text, expected_tokens
from tests.fakes.link_requests import make_submit
from tests.fakes.router_world import MODEL, TIMEOUT_SECONDS, Answer, RouterWorld, link_request
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)


async def test_an_answer_streams_from_shard_to_client(world: RouterWorld) -> None:
    """This is the main purpose of a router."""
    await world.start_shard("shard-0")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    answer = await world.ask(link, [1, 2, 3], 20)
    assert answer.token_ids[0] == expected_tokens([1, 2, 3], 0, 20)
    assert answer.texts[0] == expected_text([1, 2, 3], 0, 20)
    assert answer.finish.reason == generation_pb2.FINISH_REASON_LENGTH
    assert (answer.finish.num_prompt_tokens, answer.finish.num_output_tokens) == (3, 20)
    assert answer.starts[0] is not None
    assert answer.starts[0].shard_id == "shard-0"


async def test_many_requests_share_the_streams_without_mixing(world: RouterWorld) -> None:
    """Multiplexing by slot must never swap, lose or repeat a token. This is checked by content, with two clients of one
    name, two shards and ragged lengths."""
    for shard_id in ("shard-0", "shard-1"):
        await world.start_shard(shard_id)
    await world.start_router()
    links = [await world.connect("edge"), await world.connect("edge")]
    await world.wait_for_shards(links[0], 2)
    rng = random.Random(7)
    asked = []
    for i in range(120):
        prompt = [rng.randrange(250) for _ in range(rng.randrange(1, 60))]
        count, n = rng.randrange(1, 40), rng.choice((1, 1, 3))
        answer = Answer(n)
        sampling = generation_pb2.SamplingParams(logprobs=0) if i % 3 == 0 else generation_pb2.SamplingParams()
        links[i % 2].submit(link_request(prompt, count, n=n, sampling=sampling), answer)
        asked.append((prompt, count, n, i % 3 == 0, answer))
        if i % 10 == 0:
            await asyncio.sleep(0)
    await eventually(lambda: all(answer.done for *_, answer in asked), "all answers")
    for prompt, count, n, wants_logprobs, answer in asked:
        for index in range(n):
            tokens = expected_tokens(prompt, index, count)
            assert answer.token_ids[index] == tokens
            assert answer.texts[index] == expected_text(prompt, index, count)
            assert answer.logprobs[index] == ([-float(t) for t in tokens] if wants_logprobs else [])
    assert world.metric("kvloom_router_requests_total", model="tiny", outcome="length", error_type="")


async def test_a_cancel_reaches_the_shard_and_frees_the_slot(world: RouterWorld) -> None:
    """A client that cancels must not keep an engine busy, and the slot is reused by the next request."""
    shard = await world.start_shard("shard-0", step_seconds=0.005)
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    answer = Answer()
    handle = link.submit(link_request([5], 4000), answer)
    await eventually(lambda: answer.token_ids[0], "the first token")
    link.cancel(handle)
    await eventually(lambda: shard.num_running == 0 and shard.cancelled_slots, "the shard's cancel")
    assert not answer.done, "a sink must not be called after its cancel"
    assert (await world.ask(link, [6], 5)).token_ids[0] == expected_tokens([6], 0, 5)


async def test_a_broken_client_stream_cancels_its_requests_only(world: RouterWorld) -> None:
    """An edge that dies ends its own requests and no others."""
    shard = await world.start_shard("shard-0", step_seconds=0.005)
    await world.start_router()
    dying, living = await world.connect("edge-0"), await world.connect("edge-1")
    await world.wait_for_shards(living, 1)
    for i in range(3):
        dying.submit(link_request([i + 1], 4000), Answer())
    answer = Answer()
    living.submit(link_request([9], 100), answer)
    await eventually(lambda: shard.num_running == 4, "all sequences")
    await dying.close()
    await eventually(lambda: len(shard.cancelled_slots) == 3, "the cancels")
    await eventually(lambda: answer.done, "the other answer")
    assert answer.token_ids[0] == expected_tokens([9], 0, 100)


async def test_a_client_reports_the_losses_of_another_one_that_hangs(world: RouterWorld) -> None:
    """The client that takes a request over reports how much of it was delivered. The request is ended where it ran, its
    id is free to be resumed, the tokens beyond are credited, and no other request is affected. A repeated report
    changes nothing."""
    shard = await world.start_shard("shard-0", step_seconds=0.005)
    await world.start_router()
    hung, successor = await world.connect("edge-0"), await world.connect("edge-1")
    await world.wait_for_shards(successor, 1)
    lost, other = Answer(), Answer()
    hung.submit(link_request([1], 4000, request_id="taken"), lost)
    hung.submit(link_request([2], 60, request_id="not taken"), other)
    await eventually(lambda: len(lost.token_ids[0]) >= 5, "tokens")
    for _ in range(2):
        successor.identity.note_delegated_loss(hung.identity.link_id, "taken", 3)
        successor.report_losses()
    partial_choices = ChoiceProgress(0)
    partial_choices.token_ids.extend(expected_tokens([1], 0, 3))
    again = Answer()
    successor.submit(link_request([1], 10, request_id="taken", partial_choices=[partial_choices]), again)
    await eventually(lambda: again.done and lost.done and other.done, "all ends")
    assert lost.finish.reason == generation_pb2.FINISH_REASON_CANCELLED
    assert other.token_ids[0] == expected_tokens([2], 0, 60)
    assert again.token_ids[0] == expected_tokens([1], 0, 10)[3:]
    assert len(shard.cancelled_slots) == 1
    credited = world.metric("kvloom_router_tokens_credited_total", model=MODEL)
    assert credited == lost.finish.num_output_tokens - 3


async def test_a_request_is_settled_by_its_link_id(world: RouterWorld) -> None:
    """The client may have resumed it at another router: the request is ended, the tokens beyond are credited once, and
    no other request of that id or over that link is affected."""
    shard = await world.start_shard("shard-0", step_seconds=0.005)
    await world.start_router()
    left, other = await world.connect("sdk-0"), await world.connect("sdk-1")
    await world.wait_for_shards(other, 1)
    lost, stays = Answer(), Answer()
    left.submit(link_request([1], 4000, request_id="lost"), lost)
    left.submit(link_request([2], 60, request_id="stays"), stays)
    await eventually(lambda: len(lost.token_ids[0]) >= 5, "tokens")
    of_another = router_service_pb2.CancelRequest(request_id="lost", link_id=other.identity.link_id)
    stub = await world.stub()
    assert not (await stub.Cancel(of_another)).found
    settlement = router_service_pb2.CancelRequest(
        request_id="lost", link_id=left.identity.link_id, num_received_tokens=3
    )
    assert [(await stub.Cancel(settlement)).found for _ in range(2)] == [True, False]
    await eventually(lambda: lost.done and stays.done, "both ends")
    assert lost.finish.reason == generation_pb2.FINISH_REASON_CANCELLED
    assert stays.token_ids[0] == expected_tokens([2], 0, 60)
    assert len(shard.cancelled_slots) == 1
    credited = world.metric("kvloom_router_tokens_credited_total", model=MODEL)
    assert credited == lost.finish.num_output_tokens - 3


async def test_a_seed_is_drawn_once_and_travels_with_the_request(world: RouterWorld) -> None:
    """Without a fixed seed a second attempt could not continue the first one's answer."""
    shard = await world.start_shard("shard-0")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    await world.ask(link, [1], 2)
    await world.ask(link, [1], 2, sampling=generation_pb2.SamplingParams(seed=42, temperature=0.5))
    drawn, given = shard.submits
    assert drawn.sampling.HasField("seed")
    assert (given.sampling.seed, given.sampling.temperature) == (42, 0.5)


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"n": 17}, "INVALID_ARGUMENT", "choices"),
        ({"sampling": generation_pb2.SamplingParams(temperature=3)}, "INVALID_ARGUMENT", "sampling.temperature"),
        ({"stop": generation_pb2.StopConditions(max_tokens=0)}, "INVALID_ARGUMENT", "stop.max_tokens"),
        ({"prompt": []}, "INVALID_ARGUMENT", "prompt_token_ids"),
        ({"prompt": [4_000_000]}, "INVALID_ARGUMENT", "prompt_token_ids"),
        ({"timeout_seconds": -1.0}, "INVALID_ARGUMENT", "timeout_seconds"),
        ({"request_id": "x" * 300}, "INVALID_ARGUMENT", "request_id"),
        ({"model": "nobody"}, "MODEL_NOT_FOUND", "model"),
        ({"prompt": [1] * 5000}, "CONTEXT_LENGTH_EXCEEDED", None),
    ],
)
async def test_a_bad_request_ends_alone(world: RouterWorld, fields, reason: str, field: str | None) -> None:
    """An invalid request gets its reason and field, and the stream and its other requests continue."""
    await world.start_shard("shard-0")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    bad = Answer(fields.get("n", 1))
    link.submit(link_request(max_tokens=1, **{"prompt": [1], **fields}), bad)
    good = await world.ask(link, [2, 3], 5)
    assert good.token_ids[0] == expected_tokens([2, 3], 0, 5)
    await eventually(lambda: bad.done, "the rejection")
    assert bad.finish.reason == generation_pb2.FINISH_REASON_ERROR
    assert reason_name(bad.finish.error.reason) == reason
    if field is not None:
        assert bad.finish.error.field == field


def _connect_request(**fields) -> router_service_pb2.RouterServiceConnectRequest:
    return router_service_pb2.RouterServiceConnectRequest(**fields)


def _submit(*slots: int) -> router_service_pb2.Submit:
    return make_submit(
        model="tiny",
        prompt_token_ids=[1],
        choices=[generation_pb2.Choice(slot=slot, index=i) for i, slot in enumerate(slots)],
        stop=generation_pb2.StopConditions(max_tokens=4000),
    )


HELLO = _connect_request(hello=router_service_pb2.ClientHello(client_id="rude"))


@pytest.mark.parametrize(
    "frames",
    [
        [_connect_request(submits=[_submit(1)])],
        [HELLO, HELLO],
        [HELLO, _connect_request(submits=[_submit(1), _submit(1)])],
        [HELLO, _connect_request(submits=[_submit(3, 3)])],
        [HELLO, _connect_request(submits=[_submit()])],
    ],
    ids=["no hello", "two hellos", "slot in use", "slot twice", "no choices"],
)
async def test_a_broken_protocol_ends_the_stream(world: RouterWorld, frames) -> None:
    """Frames that cannot be answered mean that a client has lost its state, which must become visible at once."""
    shard = await world.start_shard("shard-0")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    call = (await world.stub()).Connect()
    for frame in frames:
        await call.write(frame)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _read_to_end(call)
    assert from_rpc_error(caught.value).reason_name == "PROTOCOL_VIOLATION"
    await eventually(lambda: shard.num_running == 0, "the end of its requests")


async def _read_to_end(call) -> None:
    """Reads to the end of the RPC. Raises AioRpcError unless its status is OK."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_a_client_that_does_not_read_is_cut(world: RouterWorld) -> None:
    """Queues must be bounded, and no other client may wait for a reader that stalls."""
    shard = await world.start_shard("shard-0", step_seconds=0.0)
    await world.start_router()
    living = await world.connect("edge-1")
    await world.wait_for_shards(living, 1)
    channel = grpc.aio.insecure_channel(
        world.address,
        options=[
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", 1024),
        ],
    )
    async with channel:
        call = router_service_pb2_grpc.RouterServiceStub(channel).Connect()
        await call.write(HELLO)
        for number in range(250):
            await call.write(_connect_request(submits=[_submit(number + 1)]))
        # About 130,000 tokens have to be generated until then.
        await eventually(lambda: len(shard.cancelled_slots) >= 200, "the cut", timeout_seconds=60.0)
        answer = await world.ask(living, [9], 20)
        assert answer.token_ids[0] == expected_tokens([9], 0, 20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _read_to_end(call)
        assert from_rpc_error(caught.value).reason_name == "CLIENT_TOO_SLOW"


@pytest.mark.parametrize("prompt_size", [1, 2 * LONG_PROMPT_TOKENS], ids=["short prompts", "prompts that wait"])
async def test_a_half_closed_stream_still_gets_its_answers(world: RouterWorld, prompt_size: int) -> None:
    """Simple clients half-close their stream when they have no more requests."""
    await world.start_shard("shard-0")
    await world.start_router()
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    call = (await world.stub()).Connect()
    await call.write(HELLO)
    prompt = [1] * prompt_size
    submits = [_submit(slot) for slot in (4, 5, 6)]
    for submit in submits:
        submit.request.stop.max_tokens = 30
        submit.prompt_token_ids[:] = prompt
    await call.write(_connect_request(submits=submits))
    await call.done_writing()
    tokens: dict[int, list[int]] = {}
    async with asyncio.timeout(TIMEOUT_SECONDS):
        async for frame in call:
            for slot, token_id in zip(frame.step.slots, frame.step.token_ids, strict=True):
                tokens.setdefault(slot, []).append(token_id)
    assert tokens == dict.fromkeys((4, 5, 6), expected_tokens(prompt, 0, 30))
    assert await call.code() is grpc.StatusCode.OK
