"""A shard that sleeps has given up its engine and keeps its streams; awake again, it computes the same."""

from __future__ import annotations

from collections.abc import Callable

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.shard_service_pb2 import DrainRequest, GetInfoRequest, SleepRequest, WakeRequest, WithdrawRequest
from shard_server.engines.base import Engine, EngineError
from shard_server.engines.sim_engine import SimEngine
from shard_server.server import free_memory
from tests.fakes.shard_world import EOS, VOCABULARY, shard_world, sim_config

PROMPT = list(range(100, 140))
CONFIG = sim_config(max_model_len=256)


def make_engine() -> Engine:
    return SimEngine("model", CONFIG.shard, VOCABULARY, frozenset({EOS}))


async def test_an_awakened_shard_gives_the_same_tokens_on_the_same_stream() -> None:
    """Routers stay connected: they must see the drain, the empty cache, and loads that count from zero again."""
    async with shard_world(CONFIG, make_engine(), make_engine=make_engine) as world:
        router = await world.router()
        answers: list[list[int]] = []
        for round_number in range(3):
            router.forget(1)
            await router.submit(1, PROMPT, max_tokens=8, request_id=f"r{round_number}")
            assert (await router.finish_of(1)).num_output_tokens == 8
            answers.append(router.tokens[1])
            assert router.cached
            assert not (await world.stub.Sleep(SleepRequest())).HasField("error")
            assert not (await world.stub.Sleep(SleepRequest())).HasField("error")  # it may be repeated
            await router.read_until(lambda: router.load.draining and router.load.asleep and not router.cached)
            router.forget(2)
            await router.submit(2, PROMPT)
            assert (await router.finish_of(2)).error.reason == ErrorReason.ERROR_REASON_DRAINING
            refused = await world.stub.Drain(DrainRequest(draining=False))
            assert "models wake" in refused.error.message
            assert not (await world.stub.Wake(WakeRequest())).HasField("error")
            await router.read_until(lambda: not router.load.draining and not router.load.asleep)
            assert router.load.num_running + router.load.num_waiting == 0
        assert answers[0] == answers[1] == answers[2]


async def test_what_still_runs_is_returned_to_its_router() -> None:
    """It continues elsewhere if there is another shard."""
    async with shard_world(sim_config(step_ms=20), make_engine=make_engine) as world:
        router = await world.router()
        await router.submit(1, PROMPT, max_tokens=4000)
        await router.read_until(lambda: 1 in router.tokens)
        await world.stub.Sleep(SleepRequest())
        assert (await router.finish_of(1)).error.reason == ErrorReason.ERROR_REASON_DRAINING


async def test_an_announced_sleep_changes_nothing_yet() -> None:
    """Routers still send what waited there, and a wake takes it back."""
    async with shard_world(CONFIG, make_engine(), make_engine=make_engine) as world:
        router = await world.router()
        await world.stub.Sleep(SleepRequest(only_announce=True))
        await router.read_until(lambda: router.load.asleep)
        assert not router.load.draining
        await router.submit(1, PROMPT, max_tokens=2)
        assert (await router.finish_of(1)).num_output_tokens == 2
        await world.stub.Wake(WakeRequest())
        await router.read_until(lambda: not router.load.asleep)


async def test_those_who_wait_for_the_end_see_what_has_come_and_gone() -> None:
    """Answers that are short, or prompts that are prefilled in chunks, run between two calls."""
    async with shard_world(CONFIG, make_engine(), make_engine=make_engine) as world:
        router = await world.router()
        before = await world.stub.Withdraw(WithdrawRequest(withdrawn=True))
        await router.submit(1, PROMPT, max_tokens=2)
        await router.finish_of(1)
        after = await world.stub.Withdraw(WithdrawRequest(withdrawn=True))
        assert (before.num_submitted, after.num_submitted) == (0, 1)


async def test_a_wake_that_fails_says_why_and_may_be_repeated() -> None:
    """The memory may be taken, or the file replaced by another model."""

    def fail() -> Engine:
        raise EngineError("too little memory")

    def smaller() -> Engine:
        return SimEngine("model", sim_config(max_model_len=128).shard, VOCABULARY, frozenset({EOS}))

    makers: list[Callable[[], Engine]] = [fail, smaller, make_engine]
    async with shard_world(CONFIG, make_engine(), make_engine=lambda: makers.pop(0)()) as world:
        await world.stub.Sleep(SleepRequest())
        assert "too little memory" in (await world.stub.Wake(WakeRequest())).error.message
        assert "max_model_len was 256 and is 128 now" in (await world.stub.Wake(WakeRequest())).error.message
        assert (await world.stub.GetInfo(GetInfoRequest())).load.asleep
        assert not (await world.stub.Wake(WakeRequest())).HasField("error")
        router = await world.router()
        await router.submit(1, PROMPT, max_tokens=2)
        assert (await router.finish_of(1)).num_output_tokens == 2


async def test_a_sleeping_shard_stops_at_once() -> None:
    """Nothing waits for an engine that is not there, and its memory has been freed."""
    async with shard_world(CONFIG, make_engine(), make_engine=make_engine, free_memory=free_memory) as world:
        await world.stub.Sleep(SleepRequest())
        world.stop.set()
        await world.serving


async def test_a_shard_that_cannot_make_another_engine_does_not_sleep() -> None:
    """It could never wake."""
    async with shard_world(CONFIG, make_engine()) as world:
        assert "cannot sleep" in (await world.stub.Sleep(SleepRequest())).error.message
        assert not (await world.stub.GetInfo(GetInfoRequest())).load.draining
