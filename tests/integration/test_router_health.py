"""Shards that hang behind an open connection, over real sockets: their answers migrate, and the shards return."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvloom.v1 import generation_pb2
from kvloom_common.config import KvloomConfig
from router.core.rule_settings import HealthSettings
from shard_server.engines.base import StepOutput
from shard_server.engines.sim_engine import SimEngine, expected_token_id
from tests.fakes.fake_shard import FakeShard, expected_text, expected_tokens
from tests.fakes.router_world import MODEL, Answer, RouterWorld, link_request
from tests.fakes.shard_world import EOS, VOCABULARY, shard_world, sim_config
from tests.waiting import eventually

pytest_plugins = ("tests.fakes.router_fixtures",)

STALL_SECONDS = 0.3
NUM_TOKENS = 400


async def start(world: RouterWorld, num_shards: int = 3) -> list[FakeShard]:
    world.config.router.health = HealthSettings(stall_seconds=STALL_SECONDS, probe_seconds=0.05)
    shards = [await world.start_shard(f"shard-{i}", step_seconds=0.002) for i in range(num_shards)]
    await world.start_router()
    return shards


def health(world: RouterWorld, shard_id: str, state: str) -> bool:
    return world.metric("kvloom_router_shard_health", shard_id=shard_id, state=state) == 1.0


async def test_answers_migrate_from_a_hung_shard_and_it_is_used_again(world: RouterWorld) -> None:
    """A shard that accepts work and produces nothing must not hold answers: they continue elsewhere, token for token.
    When the shard wakes up its late tokens change nothing, and it gets work once it has answered its probes."""
    shards = await start(world)
    link = await world.connect()
    await world.wait_for_shards(link, 3)
    answers = [Answer() for _ in range(12)]
    for i, answer in enumerate(answers):
        link.submit(link_request([i, 5, 9], NUM_TOKENS), answer)
    await eventually(lambda: all(answer.token_ids[0] for answer in answers), "first tokens")
    hung = max(shards, key=lambda shard: shard.num_running)
    hung_id = hung.info.shard_id
    num_hung = hung.num_running
    assert num_hung
    hung.pause()
    await eventually(lambda: health(world, hung_id, "suspected"), "suspicion")
    # New requests are placed on healthy shards as well.
    late = await world.ask(link, [77], 20)
    assert late.starts[0] is not None
    assert late.starts[0].shard_id != hung_id
    await eventually(lambda: all(answer.done for answer in answers), "all answers")
    for i, answer in enumerate(answers):
        assert answer.token_ids[0] == expected_tokens([i, 5, 9], 0, NUM_TOKENS)
        assert answer.texts[0] == expected_text([i, 5, 9], 0, NUM_TOKENS)
        assert answer.finish.num_output_tokens == NUM_TOKENS
    assert world.metric("kvloom_router_requests_moved_total", reason="suspected") == num_hung
    assert world.metric("kvloom_router_shard_trips_total", symptom="stalled") == 1
    hung.resume()
    await eventually(lambda: health(world, hung_id, "healthy"), "the shard's return")
    again = [asyncio.create_task(world.ask(link, [i, 1], 30)) for i in range(24)]
    for i, answer in enumerate(await asyncio.gather(*again)):
        assert answer.token_ids[0] == expected_tokens([i, 1], 0, 30)
    assert any(len(submit.prompt_token_ids) == 2 for submit in hung.submits)


async def test_probes_are_not_metered(world: RouterWorld) -> None:
    """The router's own probes are neither metered nor sent to a client."""
    shards = await start(world, 2)
    link = await world.connect()
    await world.wait_for_shards(link, 2)
    answer = Answer()
    link.submit(link_request([4], NUM_TOKENS), answer)
    await eventually(lambda: answer.token_ids[0], "the first token")
    hung = next(shard for shard in shards if shard.num_running)
    hung.pause()
    await eventually(lambda: answer.done, "the answer's end")
    hung.resume()
    await eventually(lambda: health(world, hung.info.shard_id, "healthy"), "the shard's return")
    assert len(hung.submits) > 1
    labels = {"model": "tiny"}
    assert world.metric("kvloom_router_tokens_total", token_type="output", **labels) == NUM_TOKENS
    assert world.metric("kvloom_router_requests_total", outcome="length", error_type="", **labels) == 1


async def test_the_only_shard_is_not_suspected(world: RouterWorld) -> None:
    """Without another shard waiting is better than failing: the answers of a shard that hangs for a while continue when
    it wakes up."""
    (shard,) = await start(world, 1)
    link = await world.connect()
    await world.wait_for_shards(link, 1)
    answer = Answer()
    link.submit(link_request([4], NUM_TOKENS), answer)
    await eventually(lambda: answer.token_ids[0], "the first token")
    shard.pause()
    # The silence is counted right before each judgement, so by then it has been judged several times.
    watched = world.server._driver.core._fleet.shards["shard-0"].health
    assert watched is not None
    await eventually(lambda: watched.silent_seconds > 1.5 * STALL_SECONDS, "a silence that is long enough")
    assert health(world, "shard-0", "healthy")
    shard.resume()
    await eventually(lambda: answer.done, "the answer's end")
    assert answer.token_ids[0] == expected_tokens([4], 0, NUM_TOKENS)


class HangingEngine(SimEngine):
    """An engine that hangs while `may_step` is not set, although the shard's process does not."""

    def __init__(self, config: KvloomConfig) -> None:
        super().__init__(MODEL, config.shard, VOCABULARY, frozenset({EOS}))
        self.may_step = asyncio.Event()
        self.may_step.set()

    async def steps(self) -> AsyncIterator[StepOutput]:
        async for output in super().steps():
            await self.may_step.wait()
            yield output


async def test_a_hung_engine_in_a_live_process_is_found_out(world: RouterWorld) -> None:
    """The shard's own event loop still runs: it answers cancels, takes submits and reports load. None of that counts as
    progress."""
    world.config.router.health = HealthSettings(stall_seconds=STALL_SECONDS, probe_seconds=0.05)
    config = sim_config(step_ms=5.0)
    config.fabric.drain_timeout_seconds = 0.1
    config.redis = world.config.redis
    engines = [HangingEngine(config) for _ in range(2)]
    async with contextlib.AsyncExitStack() as shards:
        for i, engine in enumerate(engines):
            await shards.enter_async_context(shard_world(config, engine, shard_id=f"shard-{i}"))
        await world.start_router()
        link = await world.connect()
        await world.wait_for_shards(link, 2)
        answers = [Answer() for _ in range(6)]
        for i, answer in enumerate(answers):
            sampling = generation_pb2.SamplingParams(seed=3)
            link.submit(link_request([i, 8], 200, sampling=sampling), answer)
        await eventually(lambda: all(answer.token_ids[0] for answer in answers), "first tokens")
        start = answers[0].starts[0]
        assert start is not None
        engine = engines[int(start.shard_id[-1])]
        engine.may_step.clear()
        await eventually(lambda: health(world, start.shard_id, "suspected"), "suspicion")
        await eventually(lambda: all(answer.done for answer in answers), "all answers")
        for i, answer in enumerate(answers):
            assert answer.token_ids[0] == [expected_token_id([i, 8], 3, position) for position in range(200)]
        assert health(world, start.shard_id, "suspected")
        engine.may_step.set()
        await eventually(lambda: health(world, start.shard_id, "healthy"), "the shard's return")
