"""What a shard server refuses and how, its KV events and snapshots, draining and health: over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1 import generation_pb2, shard_service_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.text.block_hash import block_hashes, root_hash
from shard_server.spot_notice import SpotNotices
from tests.fakes.shard_world import EOS, VOCABULARY, RouterEnd, ShardWorld, shard_world, sim_config, submit_of, text_of

PROMPT = list(range(100, 140))
HELLO = shard_service_pb2.RouterHello(router_id="router")


@pytest.fixture
async def world() -> AsyncIterator[ShardWorld]:
    async with shard_world(sim_config(max_model_len=256)) as started:
        yield started


@pytest.fixture
async def router(world: ShardWorld) -> RouterEnd:
    return await world.router()


async def health_of(world: ShardWorld) -> int:
    stub = health_pb2_grpc.HealthStub(world.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service="kvloom.v1.ShardService"))).status


@pytest.mark.parametrize(
    "frames",
    [
        [{}],
        [{"hello": shard_service_pb2.RouterHello()}],
        [{"hello": HELLO, "submits": [submit_of(1, PROMPT)]}],
        [{"hello": HELLO}, {"hello": HELLO}],
        [{"hello": HELLO}, {"submits": [submit_of(1, PROMPT, max_tokens=200), submit_of(1, PROMPT)]}],
        [{"hello": HELLO}, {"submits": [submit_of(1, PROMPT, choices=[])]}],
        [{"hello": HELLO}, {"submits": [submit_of(1, PROMPT, choices=[generation_pb2.Choice(slot=1)] * 2)]}],
    ],
    ids=["no hello", "nameless", "submit in hello", "two hellos", "slot in use", "no choice", "slot twice"],
)
async def test_a_router_that_breaks_the_protocol_is_told_so_alone(
    world: ShardWorld, router: RouterEnd, frames: list[dict[str, Any]]
) -> None:
    """Its stream ends with PROTOCOL_VIOLATION, its sequences are cancelled, and the others continue."""
    bad = RouterEnd(world.stub)
    for frame in frames:
        await bad.write(**frame)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await bad.read_until(lambda: False)
    assert from_rpc_error(refused.value).reason == ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION
    await router.submit(1, PROMPT, max_tokens=3)
    assert (await router.finish_of(1)).num_output_tokens == 3
    await router.read_until(lambda: router.load.num_running == 0)


@pytest.mark.parametrize(
    ("prompt", "fields", "reason", "field"),
    [
        ([], {}, ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "prompt_token_ids"),
        ([VOCABULARY], {}, ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "prompt_token_ids"),
        (PROMPT, {"output_token_ids": [2**32 - 1]}, ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "choices."),
        (PROMPT, {"output_token_ids": [5] * 9}, ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "choices."),
        (PROMPT, {"num_delivered_chars": 3}, ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "choices."),
        (PROMPT, {"max_tokens": 0}, ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "stop.max_tokens"),
        (PROMPT, {"temperature": float("nan")}, ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "sampling.temperature"),
        (PROMPT, {"stop": [""]}, ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "stop.stop[0]"),
        (PROMPT, {"max_tokens": 217}, ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED, "stop.max_tokens"),
        (PROMPT, {"max_tokens": 2**32 - 1}, ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED, "stop.max_tokens"),
        ([5] * 256, {}, ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED, "prompt_token_ids"),
        (PROMPT, {"top_k": 5}, ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER, "sampling.top_k"),
        (PROMPT, {"presence_penalty": 1}, ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER, "sampling.presence_penalty"),
        (PROMPT, {"frequency_penalty": 1}, ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER, "sampling.frequency_"),
        (PROMPT, {"min_p": 0.1}, ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER, "sampling.min_p"),
        (PROMPT, {"repetition_penalty": 2}, ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER, "sampling.repetition_"),
        (PROMPT, {"logit_bias": {5: 1}}, ErrorReason.ERROR_REASON_UNSUPPORTED_PARAMETER, "sampling.logit_bias"),
        (PROMPT, {"min_tokens": 300}, ErrorReason.ERROR_REASON_INVALID_ARGUMENT, "stop.min_tokens"),
    ],
)
async def test_a_bad_submit_is_refused_by_name_and_breaks_nothing(
    router: RouterEnd, prompt: list[int], fields: dict[str, Any], reason: int, field: str
) -> None:
    """One finish with the reason and the field; the good submit in the same frame runs."""
    await router.write(submits=[submit_of(1, prompt, **fields), submit_of(2, PROMPT, max_tokens=216)])
    finish = await router.finish_of(1)
    assert finish.reason == generation_pb2.FINISH_REASON_ERROR
    assert (finish.error.reason, finish.num_output_tokens) == (reason, 0)
    assert finish.error.field.startswith(field)
    assert finish.error.message
    assert (await router.finish_of(2)).num_output_tokens == 216


async def test_listed_special_tokens_are_shown(router: RouterEnd) -> None:
    """Also those of an earlier attempt whose text was not delivered."""
    fields: dict[str, Any] = {"output_token_ids": [5, EOS], "ignore_eos": True, "max_tokens": 3}
    await router.write(submits=[submit_of(1, PROMPT, shown_special_token_ids=[EOS], **fields)])
    await router.write(submits=[submit_of(2, PROMPT, **fields)])
    await router.finish_of(1)
    await router.finish_of(2)
    assert router.text[1] == text_of([5]) + "</s>" + text_of(router.tokens[1])
    assert router.text[2] == text_of([5]) + text_of(router.tokens[2])


async def test_a_refused_submit_gives_its_hand_off_back() -> None:
    """Its KV was not asked for, so that another shard can fetch it; a mistake of the client would recur there."""
    async with shard_world(sim_config(max_batch=1, max_waiting=0)) as world:
        router = await world.router()
        await router.write(submits=[submit_of(0, PROMPT, max_tokens=1000)])
        full, wrong = submit_of(10, PROMPT), submit_of(11, [])
        full.handoff = wrong.handoff = b"kv"
        await router.write(submits=[full])
        assert (await router.finish_of(10)).handoff == b"kv"
        await router.write(cancel_slots=[0])
        await router.finish_of(0)
        await router.read_until(lambda: not router.load.num_running)
        await router.write(submits=[wrong])
        finish = await router.finish_of(11)
        assert (finish.error.reason, finish.handoff) == (ErrorReason.ERROR_REASON_INVALID_ARGUMENT, b"")


async def test_beyond_the_queue_submits_are_refused_whole() -> None:
    """max_batch run, max_waiting wait; of a submit of several choices all run or none."""
    async with shard_world(sim_config(max_batch=2, max_waiting=2)) as world:
        router = await world.router()
        await router.write(submits=[submit_of(slot, PROMPT, max_tokens=1000) for slot in range(3)])
        choices = [generation_pb2.Choice(slot=10 + i, index=i) for i in range(2)]
        await router.write(submits=[submit_of(0, PROMPT, choices=choices)])
        await router.read_until(lambda: len(router.finishes) == 2)
        for slot in (10, 11):
            error = router.finishes[slot].error
            assert error.reason == ErrorReason.ERROR_REASON_QUEUE_FULL
            assert error.retry_after_seconds > 0
        await router.write(cancel_slots=[0, 1, 2])
        await router.read_until(lambda: router.load.num_available_blocks == router.load.num_blocks)
        router.forget(10)
        await router.submit(10, PROMPT, max_tokens=2)
        assert (await router.finish_of(10)).num_output_tokens == 2


async def test_kv_events_have_no_gap_and_are_the_same_for_every_router() -> None:
    """RouterEnd asserts each number; blocks are evicted on the way; snapshots agree with the replay, whenever asked."""
    async with shard_world(sim_config(step_ms=0, num_blocks=12, max_model_len=128)) as world:
        early = await world.router("early")
        for i in range(8):
            await early.submit(i, [1000 + i] * 50, max_tokens=20)
            await early.finish_of(i)
        late = await world.router("late")
        for i in range(8, 16):
            await early.submit(i, [1000 + i] * 50, max_tokens=20)
            await early.finish_of(i)
        for router in (early, late):
            await router.write(want_kv_snapshot=True)
            await router.read_until(lambda router=router: len(router.snapshots) == 2)
        assert early.cached == late.cached
        assert early.kv_number == late.kv_number
        assert 0 < len(early.cached) <= 12


async def test_hashes_are_those_that_a_router_computes(router: RouterEnd) -> None:
    """From the model's name, the tenant's salt and the tokens alone."""
    await router.submit(1, PROMPT, max_tokens=1, cache_salt="tenant")
    await router.finish_of(1)
    assert router.cached == set(block_hashes(PROMPT, 16, root_hash("model", cache_salt="tenant")))


async def test_draining_refuses_the_new_and_finishes_the_old(world: ShardWorld, router: RouterEnd) -> None:
    """For maintenance; it can be taken back."""
    assert await health_of(world) == health_pb2.HealthCheckResponse.SERVING
    await router.submit(1, PROMPT, max_tokens=100)
    await router.read_until(lambda: 1 in router.tokens)
    answer = await world.stub.Drain(shard_service_pb2.DrainRequest(draining=True))
    assert answer.num_running == 1
    await router.read_until(lambda: router.load.draining)
    assert await health_of(world) == health_pb2.HealthCheckResponse.NOT_SERVING
    await router.submit(2, PROMPT)
    assert (await router.finish_of(2)).error.reason == ErrorReason.ERROR_REASON_DRAINING
    assert (await router.finish_of(1)).num_output_tokens == 100
    await world.stub.Drain(shard_service_pb2.DrainRequest(draining=False))
    await router.submit(3, PROMPT, max_tokens=2)
    assert (await router.finish_of(3)).num_output_tokens == 2
    assert await health_of(world) == health_pb2.HealthCheckResponse.SERVING


async def test_stopping_finishes_what_runs_and_ends_the_streams_in_good_order() -> None:
    """SIGTERM sets the same event."""
    async with shard_world() as world:
        router = await world.router()
        await router.submit(1, PROMPT, max_tokens=50)
        await router.read_until(lambda: 1 in router.tokens)
        world.stop.set()
        assert (await router.finish_of(1)).num_output_tokens == 50
        with pytest.raises(AssertionError, match="the stream has ended"):
            await router.read_until(lambda: False)
        assert await router.call.code() == grpc.StatusCode.OK
        await asyncio.wait_for(world.serving, 10)


async def test_a_drain_that_takes_too_long_is_cut_short() -> None:
    """A long answer never delays a stop: it is returned with a reason for which routers resume it elsewhere, before the
    stream ends cleanly."""
    config = sim_config()
    config.fabric.drain_timeout_seconds = 0.1
    async with shard_world(config) as world:
        router = await world.router()
        await router.submit(1, PROMPT, max_tokens=8000)
        await router.read_until(lambda: 1 in router.tokens)
        world.stop.set()
        finish = await router.finish_of(1)
        assert finish.reason == generation_pb2.FINISH_REASON_ERROR
        assert finish.error.reason == ErrorReason.ERROR_REASON_DRAINING
        assert finish.num_output_tokens == len(router.tokens[1])
        with pytest.raises(AssertionError, match="the stream has ended"):
            await router.read()
        await asyncio.wait_for(world.serving, 10)


async def test_a_drain_with_a_deadline_asks_routers_to_move_what_runs() -> None:
    """The shard cannot know whether another one has room: it asks, and continues until its router has decided."""
    config = sim_config()
    config.fabric.drain_timeout_seconds = 0.1
    async with shard_world(config) as world:
        router = await world.router()
        await router.submit(1, PROMPT, max_tokens=8000)
        await router.read_until(lambda: 1 in router.tokens)
        await world.stub.Drain(shard_service_pb2.DrainRequest(draining=True, deadline_seconds=0.05))
        await router.read_until(lambda: router.load.draining)
        await router.read_until(lambda: router.load.hand_over)
        num_tokens = len(router.tokens[1])
        await router.read_until(lambda: len(router.tokens[1]) > num_tokens)
        await world.stub.Drain(shard_service_pb2.DrainRequest(draining=False))
        await router.read_until(lambda: not router.load.draining and not router.load.hand_over)
        refused = await world.stub.Drain(shard_service_pb2.DrainRequest(draining=True, deadline_seconds=-1.0))
        assert refused.error.field == "deadline_seconds"
        assert not (await world.stub.GetInfo(shard_service_pb2.GetInfoRequest())).load.draining


async def test_notice_tells_routers_how_long_the_shard_stays() -> None:
    """They decide what moves. What has not moved runs until the process has to end, and is returned then."""
    ends: list[str] = []
    async with shard_world(sim_config(), on_leave=lambda: ends.append("ends")) as world:
        router = await world.router()
        await router.submit(1, PROMPT, max_tokens=8000)
        await router.read_until(lambda: 1 in router.tokens)
        await world.stub.Drain(shard_service_pb2.DrainRequest(draining=True, empty_within_seconds=0.5, exit=True))
        await router.read_until(lambda: router.load.draining)
        assert 0.0 < router.load.empty_within_seconds <= 0.5
        assert ends == ["ends"]
        refused = await world.stub.Drain(shard_service_pb2.DrainRequest(draining=False))
        assert refused.error.reason == ErrorReason.ERROR_REASON_DRAINING
        finish = await router.finish_of(1)
        assert finish.error.reason == ErrorReason.ERROR_REASON_DRAINING
        await asyncio.wait_for(world.serving, 10)


async def test_a_shard_with_notice_ends_as_soon_as_it_is_empty() -> None:
    """A machine that is not needed any more is not paid for until the deadline."""
    async with shard_world(sim_config(), on_leave=lambda: None) as world:
        router = await world.router()
        await router.submit(1, PROMPT, max_tokens=20)
        await world.stub.Drain(shard_service_pb2.DrainRequest(draining=True, empty_within_seconds=600.0, exit=True))
        assert (await router.finish_of(1)).reason == generation_pb2.FINISH_REASON_LENGTH
        await asyncio.wait_for(world.serving, 10)


async def test_a_notice_in_a_file_ends_the_shard(tmp_path: Path) -> None:
    """As an agent on the machine writes it when the cloud takes the machine back."""
    file = tmp_path / "notice"
    async with shard_world(sim_config(), on_leave=lambda: None, notices=SpotNotices(str(file), 600.0)) as world:
        router = await world.router()
        await router.submit(1, PROMPT, max_tokens=8000)
        await router.read_until(lambda: 1 in router.tokens)
        file.write_text("5\n")
        await router.read_until(lambda: router.load.HasField("empty_within_seconds"))
        assert router.load.empty_within_seconds <= 5.0
        await router.write(cancel_slots=[1])
        await asyncio.wait_for(world.serving, 10)


@pytest.mark.parametrize(
    ("order", "field"),
    [
        ({"draining": True, "empty_within_seconds": 0.0}, "empty_within_seconds"),
        ({"draining": True, "empty_within_seconds": float("nan")}, "empty_within_seconds"),
        ({"draining": False, "empty_within_seconds": 5.0}, "empty_within_seconds"),
        ({"draining": True, "empty_within_seconds": 5.0, "deadline_seconds": 5.0}, "deadline_seconds"),
        ({"draining": True, "exit": True}, "exit"),
        ({"draining": True, "empty_within_seconds": 5.0, "exit": True}, "exit"),  # it has no `on_leave`
    ],
)
async def test_orders_that_contradict_themselves_are_refused(
    world: ShardWorld, order: dict[str, Any], field: str
) -> None:
    """The error names the field, and nothing has changed."""
    answer = await world.stub.Drain(shard_service_pb2.DrainRequest(**order))
    assert answer.error.field == field
    assert not (await world.stub.GetInfo(shard_service_pb2.GetInfoRequest())).load.draining


async def test_info_and_load_are_there_for_people(world: ShardWorld, router: RouterEnd) -> None:
    """GetInfo by grpcurl."""
    answer = await world.stub.GetInfo(shard_service_pb2.GetInfoRequest())
    assert answer.info == router.info
    assert answer.load.num_blocks == router.info.num_blocks


async def test_metrics_count_what_was_served(world: ShardWorld, router: RouterEnd) -> None:
    """Under the names that dashboards read from vLLM."""
    for slot in range(2):
        await router.submit(slot, PROMPT, max_tokens=5)
        await router.finish_of(slot)

    def value(name: str, **labels: str) -> float | None:
        return world.metrics.get_sample_value(name, labels or {"model_name": "model"})

    assert value("vllm:generation_tokens_total") == 10
    assert value("vllm:prompt_tokens_total") == 80
    assert value("vllm:prefix_cache_hits_total") == 32
    assert value("vllm:num_requests_running") == 0
    assert value("vllm:kv_cache_usage_perc") == 0
    assert value("vllm:time_to_first_token_seconds_count") == 2
    assert value("vllm:e2e_request_latency_seconds_count") == 2
    assert value("kvloom_shard_finished_sequences_total", reason="length") == 2
