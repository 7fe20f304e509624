"""The shard's data plane over real gRPC, on the simulated engine: content, usage, slots, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1 import generation_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.shard_service_pb2 import LoadReport, RouterHello
from kvloom.v1.shard_service_pb2_grpc import ShardServiceStub
from shard_server.engines.base import EngineError, RequestRefusedError, SequenceFinishReason, SequenceStart, StepOutput
from shard_server.engines.sim_engine import expected_token_id
from shard_server.submits import choice_seed
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.shard_world import RouterEnd, ShardWorld, shard_world, sim_config, submit_of, text_of

PROMPT = list(range(100, 140))


def expected(prompt: Sequence[int], count: int, seed: int = 7) -> list[int]:
    return [expected_token_id(prompt, seed, position) for position in range(count)]


@pytest.fixture
async def world() -> AsyncIterator[ShardWorld]:
    async with shard_world() as started:
        yield started


@pytest.fixture
async def router(world: ShardWorld) -> RouterEnd:
    return await world.router()


async def test_the_first_frame_says_what_the_shard_is_and_has_cached(router: RouterEnd) -> None:
    """A router knows the shard before it submits anything."""
    assert router.info.shard_id == "shard-0"
    assert router.info.incarnation_id
    assert (router.info.engine, router.info.model, router.info.block_size) == ("sim", "model", 16)
    assert "seeded_resume" in router.info.capabilities
    assert router.info.version
    assert router.load.num_available_blocks == router.load.num_blocks == router.info.num_blocks
    assert (router.load.prefill_tokens_per_second, router.load.decode_step_seconds) == (1e7, 0.001)
    assert router.snapshots[0].number == 0


async def test_tokens_text_and_usage_are_exact(router: RouterEnd) -> None:
    """The whole life of one sequence; a second one reuses the first one's blocks."""
    await router.submit(3, PROMPT, max_tokens=8)
    finish = await router.finish_of(3)
    assert router.tokens[3] == expected(PROMPT, 8)
    assert router.text[3] == text_of(expected(PROMPT, 8))
    assert finish.reason == generation_pb2.FINISH_REASON_LENGTH
    assert (finish.num_prompt_tokens, finish.num_output_tokens, finish.num_cached_tokens) == (40, 8, 0)
    router.forget(3)
    await router.submit(3, PROMPT, max_tokens=2)
    assert (await router.finish_of(3)).num_cached_tokens == 32
    assert router.starts[3].num_cached_tokens == 32


async def test_without_max_tokens_the_window_is_the_limit() -> None:
    """The rest of the window, not a token more."""
    async with shard_world(sim_config(step_ms=0, max_model_len=64)) as world:
        router = await world.router()
        submit = submit_of(1, PROMPT)
        submit.stop.ClearField("max_tokens")
        await router.write(submits=[submit])
        finish = await router.finish_of(1)
    assert (finish.reason, finish.num_output_tokens) == (generation_pb2.FINISH_REASON_LENGTH, 24)


async def test_64_streams_of_two_routers_lose_and_double_nothing() -> None:
    """One frame a step carries all of a router's sequences; each router hears only of its own."""
    async with shard_world(sim_config(step_ms=0)) as world:
        routers = [await world.router(name) for name in ("one", "two")]
        for number, router in enumerate(routers):
            prompts = [[1000 + 50 * number + slot] * 20 for slot in range(32)]
            await router.write(submits=[submit_of(s, p, max_tokens=128) for s, p in enumerate(prompts)])
        await asyncio.gather(*(r.read_until(lambda r=r: len(r.finishes) == 32) for r in routers))
        for number, router in enumerate(routers):
            for slot in range(32):
                tokens = expected([1000 + 50 * number + slot] * 20, 128)
                assert router.tokens[slot] == tokens
                assert router.text[slot] == text_of(tokens)
            assert len(router.frames) < 300


async def test_every_choice_has_its_slot_and_its_seed(router: RouterEnd) -> None:
    """n > 1 is one submit; choice 0 says what a request of one choice would."""
    choices = [generation_pb2.Choice(slot=10 + index, index=index) for index in range(3)]
    await router.submit(0, PROMPT, choices=choices)
    await router.read_until(lambda: len(router.finishes) == 3)
    for index in range(3):
        assert router.tokens[10 + index] == expected(PROMPT, 8, choice_seed(7, index))
    assert len({tuple(tokens) for tokens in router.tokens.values()}) == 3


async def test_a_cancel_is_answered_and_frees_the_blocks(router: RouterEnd) -> None:
    """The slot and the request's name are free at once; usage counts what was delivered."""
    await router.submit(1, PROMPT, max_tokens=2000)
    await router.read_until(lambda: len(router.tokens.get(1, ())) >= 3)
    await router.write(cancel_slots=[1])
    finish = await router.finish_of(1)
    assert finish.reason == generation_pb2.FINISH_REASON_CANCELLED
    assert finish.num_output_tokens == len(router.tokens[1])
    await router.read_until(lambda: router.load.num_available_blocks == router.load.num_blocks)
    assert router.load.num_running == 0
    router.forget(1)
    await router.submit(1, PROMPT, max_tokens=3)
    assert (await router.finish_of(1)).num_output_tokens == 3
    assert router.tokens[1] == expected(PROMPT, 3)


async def test_submit_and_cancel_in_one_frame_end_cancelled(router: RouterEnd) -> None:
    """The client may be gone before its request has left the router."""
    await router.write(submits=[submit_of(1, PROMPT, max_tokens=2000)], cancel_slots=[1, 77])
    assert (await router.finish_of(1)).reason == generation_pb2.FINISH_REASON_CANCELLED
    assert 77 not in router.finishes


@pytest.mark.parametrize("way", ["cancelled", "half-closed"])
async def test_a_broken_stream_cancels_its_sequences_and_no_others(world: ShardWorld, way: str) -> None:
    """A router that dies must not leave its work in the engine."""
    watcher, dying = await world.router("watcher"), await world.router("dying")
    await watcher.submit(1, [7] * 20, max_tokens=2000)
    await dying.write(submits=[submit_of(slot, PROMPT, max_tokens=2000) for slot in range(5)])
    await watcher.read_until(lambda: watcher.load.num_running == 6)
    if way == "cancelled":
        dying.call.cancel()
    else:
        await dying.call.done_writing()
    await watcher.read_until(lambda: watcher.load.num_running == 1)
    num_tokens = len(watcher.tokens[1])
    await watcher.read_until(lambda: len(watcher.tokens[1]) > num_tokens + 3)
    await watcher.write(cancel_slots=[1])
    await watcher.read_until(lambda: watcher.load.num_available_blocks == watcher.load.num_blocks)


async def test_the_routers_own_parts_of_the_load_add_up() -> None:
    """Each router sees what the others have placed: the totals less its own part. Every report of the same step has the
    same totals."""
    async with shard_world(sim_config(step_ms=5, max_batch=4)) as world:
        routers = [await world.router("a"), await world.router("b")]
        for router, count in zip(routers, (2, 4), strict=True):
            await router.write(submits=[submit_of(slot, PROMPT, max_tokens=200) for slot in range(count)])
        for router in routers:
            await router.read_until(lambda router=router: len(router.finishes) >= 2 and not router.load.num_waiting)
    first, second = [{_totals(load): _own_part(load) for load in _loads(router)} for router in routers]
    common = first.keys() & second.keys()
    assert len(common) > 5
    for totals in common:
        assert tuple(map(sum, zip(first[totals], second[totals], strict=True))) == totals


async def test_a_submit_is_told_to_the_other_routers_before_the_engine_has_made_a_step() -> None:
    """A step of the engine may take long; until it ends the others would place on a shard that is not free."""
    async with shard_world(engine=ScriptedEngine()) as world:
        placing, other = await world.router("placing"), await world.router("other")
        await placing.submit(1, PROMPT, max_tokens=4)
        await other.read_until(lambda: other.load.num_waiting == 1)
        assert _totals(other.load) == (0, 1, len(PROMPT), 0)
        assert _own_part(other.load) == (0, 0, 0, 0)
        await placing.read_until(lambda: placing.load.num_waiting == 1)
        assert _own_part(placing.load) == _totals(placing.load)


def _loads(router: RouterEnd) -> list[LoadReport]:
    return [frame.load for frame in router.frames if frame.HasField("load")]


def _totals(load: LoadReport) -> tuple[int, ...]:
    return load.num_running, load.num_waiting, load.num_queued_prefill_tokens, load.num_decode_context_tokens


def _own_part(load: LoadReport) -> tuple[int, ...]:
    return (
        load.num_own_running,
        load.num_own_waiting,
        load.num_own_queued_prefill_tokens,
        load.num_own_decode_context_tokens,
    )


async def test_a_router_that_does_not_read_is_cut_off_and_the_other_goes_on() -> None:
    """What waits for one router is bounded, and costs the others nothing."""
    # A client's gRPC buffers megabytes by itself, unless it is configured otherwise.
    modest = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
    async with (
        shard_world(sim_config(step_ms=1), max_pending_frames=50) as world,
        grpc.aio.insecure_channel(world.address, options=[*modest, ("grpc.use_local_subchannel_pool", 1)]) as channel,
    ):
        slow = RouterEnd(ShardServiceStub(channel))
        await slow.write(hello=RouterHello(router_id="slow"))
        await slow.read()
        await slow.write(submits=[submit_of(slot, PROMPT, max_tokens=8000) for slot in range(40)])
        good = await world.router("good")
        await good.submit(1, PROMPT, max_tokens=64)
        finish = await good.finish_of(1)
        assert finish.num_output_tokens == 64
        assert good.tokens[1] == expected(PROMPT, 64)
        await good.read_until(lambda: good.load.num_running == 0)
        assert good.load.num_available_blocks == good.load.num_blocks
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await slow.read_until(lambda: len(slow.finishes) == 40)
        assert from_rpc_error(refused.value).reason == ErrorReason.ERROR_REASON_CLIENT_TOO_SLOW


async def test_a_stop_string_ends_the_answer_before_it(router: RouterEnd) -> None:
    """The engine is cancelled, and its further output is not delivered."""
    tokens = expected(PROMPT, 6)
    stop = f"{tokens[3]} w{tokens[4]}"
    await router.submit(1, PROMPT, max_tokens=2000, stop=["never said", stop])
    finish = await router.finish_of(1)
    assert (finish.reason, finish.stop_string) == (generation_pb2.FINISH_REASON_STOP, stop)
    assert router.text[1] == text_of(tokens[:3]) + " w"
    assert router.tokens[1] == tokens[:5]
    assert finish.num_output_tokens == 5
    await router.read_until(lambda: router.load.num_available_blocks == router.load.num_blocks)


async def test_held_back_text_is_delivered_at_the_end(router: RouterEnd) -> None:
    """The beginning of a stop string that does not come is ordinary text."""
    tokens = expected(PROMPT, 4)
    await router.submit(1, PROMPT, max_tokens=4, stop=[f" w{tokens[3]} and more"])
    finish = await router.finish_of(1)
    assert (finish.reason, finish.stop_string) == (generation_pb2.FINISH_REASON_LENGTH, "")
    assert router.text[1] == text_of(tokens)


async def test_a_stop_token_counts_and_has_no_text(router: RouterEnd) -> None:
    """As with the end-of-sequence token."""
    tokens = expected(PROMPT, 5)
    await router.submit(1, PROMPT, max_tokens=100, stop_token_ids=[tokens[4]])
    finish = await router.finish_of(1)
    assert (finish.reason, finish.num_output_tokens) == (generation_pb2.FINISH_REASON_STOP, 5)
    assert router.tokens[1] == tokens
    assert router.text[1] == text_of(tokens[:4])


async def test_a_resumed_sequence_continues_tokens_and_text(router: RouterEnd) -> None:
    """Another shard delivered 5 tokens and the text of 4 of them; usage counts all."""
    tokens = expected(PROMPT, 8)
    delivered = text_of(tokens[:4])
    await router.submit(1, PROMPT, output_token_ids=tokens[:5], num_delivered_chars=len(delivered))
    finish = await router.finish_of(1)
    assert router.tokens[1] == tokens[5:]
    assert delivered + router.text[1] == text_of(tokens)
    assert finish.num_output_tokens == 8


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 5}, generation_pb2.FINISH_REASON_LENGTH),
        ({"stop": ["w"]}, generation_pb2.FINISH_REASON_STOP),
        ({"stop_token_ids": [expected(PROMPT, 5)[4]]}, generation_pb2.FINISH_REASON_STOP),
    ],
)
async def test_a_resumed_sequence_that_had_ended_finishes_at_once(
    router: RouterEnd, fields: dict[str, Any], reason: int
) -> None:
    """The shard died between its last token and the report of the end."""
    await router.submit(1, PROMPT, output_token_ids=expected(PROMPT, 5), **fields)
    finish = await router.finish_of(1)
    assert (finish.reason, finish.num_output_tokens) == (reason, 5)
    assert not router.tokens.get(1)


async def test_logprobs_come_one_per_token(router: RouterEnd) -> None:
    """Sparse in the frame: only for the slots that asked."""
    await router.write(submits=[submit_of(1, PROMPT, logprobs=2), submit_of(2, PROMPT)])
    await router.read_until(lambda: len(router.finishes) == 2)
    assert set(router.logprobs) == {1}
    assert [len(entry.top_token_ids) for entry in router.logprobs[1]] == [2] * 8
    assert [entry.top_token_ids[0] for entry in router.logprobs[1]] == router.tokens[1]


async def test_steps_of_several_tokens_are_cut_exactly_at_the_stop_string() -> None:
    """Engines may bring more than one token a step; nothing behind the end is delivered or counted."""
    engine = ScriptedEngine()
    async with shard_world(engine=engine) as world:
        router = await world.router()
        await router.write(submits=[submit_of(1, PROMPT, stop=["w13"]), submit_of(2, PROMPT, ignore_eos=True)])
        await router.write(want_kv_snapshot=True)
        await router.read_until(lambda: len(router.snapshots) == 2)
        one, two = engine.submitted
        assert (one.stop_token_ids, two.stop_token_ids) == ({2}, frozenset())
        engine.put_tokens(one, 11, 12)
        engine.put_tokens(two, 21)
        engine.put_tokens(one, 13, 14, 15)
        engine.put_tokens(one, 16)  # late
        engine.put_tokens(two, 2, 22, end=SequenceFinishReason.LENGTH)
        await router.read_until(lambda: len(router.finishes) == 2)
    assert router.tokens == {1: [11, 12, 13], 2: [21, 2, 22]}
    assert router.text == {1: " w11 w12 ", 2: " w21 w22"}
    assert [router.finishes[slot].num_output_tokens for slot in (1, 2)] == [3, 3]
    assert engine.cancelled == [one.request_id]


async def test_first_tokens_come_first_in_their_frame() -> None:
    """A client that waits for its first token waits longest, and every hop sends a frame's tokens in their order."""
    engine = ScriptedEngine()
    async with shard_world(engine=engine) as world:
        router = await world.router()
        await router.write(submits=[submit_of(slot, PROMPT) for slot in (1, 2, 3)], want_kv_snapshot=True)
        await router.read_until(lambda: len(router.snapshots) == 2)
        names = [request.request_id for request in engine.submitted]
        engine.put(StepOutput(names[:1], [[11]], starts=[SequenceStart(names[0], 0, 0.0)]))
        await router.read_until(lambda: bool(router.tokens))
        engine.put(StepOutput(names, [[12], [21], [31]], starts=[SequenceStart(name, 0, 0.0) for name in names[1:]]))
        await router.read_until(lambda: len(router.tokens) == 3)
    assert list(router.frames[-1].step.slots) == [2, 3, 1]
    assert router.tokens == {1: [11, 12], 2: [21], 3: [31]}


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (RequestRefusedError("prompt over 8192 tokens"), ErrorReason.ERROR_REASON_INVALID_ARGUMENT),
        (EngineError("the engine is no longer running"), ErrorReason.ERROR_REASON_ENGINE_FAILED),
    ],
)
async def test_what_no_engine_can_run_is_the_clients_error(refusal: EngineError, reason: int) -> None:
    """A retry on every shard would not help; a request that only this engine cannot run is tried elsewhere."""
    engine = ScriptedEngine()
    engine.refusal = refusal
    async with shard_world(engine=engine) as world:
        router = await world.router()
        await router.write(submits=[submit_of(1, PROMPT)])
        await router.read_until(lambda: len(router.finishes) == 1)
        assert router.finishes[1].error.reason == reason


async def test_an_engine_that_dies_ends_its_sequences_and_the_server() -> None:
    """The supervisor restarts the process; routers retry elsewhere."""
    engine = ScriptedEngine()
    async with shard_world(engine=engine) as world:
        router = await world.router()
        await router.write(submits=[submit_of(1, PROMPT), submit_of(2, PROMPT)], want_kv_snapshot=True)
        await router.read_until(lambda: len(router.snapshots) == 2)
        engine.put_tokens(engine.submitted[0], 11)
        engine.die()
        await router.read_until(lambda: len(router.finishes) == 2)
        for slot in (1, 2):
            assert router.finishes[slot].error.reason == ErrorReason.ERROR_REASON_ENGINE_FAILED
            assert "memory" not in router.finishes[slot].error.message
        assert router.tokens == {1: [11]}
        with pytest.raises(Exception, match="out of memory"):
            await asyncio.wait_for(world.serving, 10)
