"""Shortest prefill first in both engines: who is admitted next, and that answers do not change."""

from __future__ import annotations

import random

import pytest

from kvloom_common.config import ShardConfig, SimConfig
from kvloom_common.text.block_hash import root_hash
from shard_server.engines.base import EngineRequest, Sampling, SequenceFinishReason
from shard_server.engines.queue_order import AGING, MAX_PATIENCE_SECONDS
from shard_server.engines.sim_engine import SimEngine
from tests.fakes.fake_model_runner import VOCAB_SIZE, FakeModelRunner
from tests.step_bench import Answer, StepBench, same

BLOCK_SIZE = 4
GREEDY = Sampling(temperature=0.0)


class ShortestFirst(StepBench):
    """Virtual time: 0.02 s a step; the runner is as fast as the budget makes it."""

    def __init__(self, *, num_blocks: int = 256, max_batch: int = 1, budget: int = 64) -> None:
        runner = FakeModelRunner(block_size=BLOCK_SIZE, num_blocks=num_blocks)
        super().__init__(
            runner,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_batch=max_batch,
            budget=budget,
            queue_order="shortest_prefill",
        )
        self.started: list[str] = []
        self.run(request("first", [1] * 8, max_tokens=1))  # so that the speed is known

    def serve(self) -> list[str]:
        """Who got the first token, in order."""
        while self.loop.has_work:
            self.step()
        return self.started

    def step(self):
        output = super().step()
        self.started += [start.request_id for start in output.starts] if output else []
        return output


def request(name: str, prompt: list[int], max_tokens: int = 2) -> EngineRequest:
    return EngineRequest(name, prompt, GREEDY, max_tokens, root_hash=root_hash("m"))


def test_the_shortest_prefill_goes_first() -> None:
    """It waits least and holds up the others least."""
    bench = ShortestFirst()
    bench.add(*[request(f"r{n}", [n] * n) for n in (40, 9, 30, 20)])
    assert bench.serve() == ["first", "r9", "r20", "r30", "r40"]


def test_what_lies_in_the_cache_does_not_count() -> None:
    """A long conversation's next turn is short work; and what is evicted meanwhile counts again."""
    bench = ShortestFirst()
    bench.run(request("turn1", [7] * 40, max_tokens=1))
    bench.add(request("new", [5] * 20), request("turn2", [7] * 40 + [8, 9]))
    assert bench.serve()[-2:] == ["turn2", "new"]


def test_who_has_waited_goes_before_shorter_ones() -> None:
    """Aging: a prompt is overtaken only by what comes while its patience lasts."""
    bench = ShortestFirst()
    bench.add(request("running", [1] * 4, max_tokens=500))
    output = bench.step()
    assert output is not None
    patience_seconds = 60 / output.load.prefill_tokens_per_second / AGING
    assert patience_seconds < MAX_PATIENCE_SECONDS
    bench.add(request("long", [2] * 60))
    too_late = bench.clock + patience_seconds
    while bench.clock < too_late:
        bench.step()
    bench.add(request("short", [3] * 4))
    bench.loop.cancel("running")
    assert bench.serve()[-2:] == ["long", "short"]


def test_what_was_preempted_resumes_before_others_begin() -> None:
    """Its client has the beginning of an answer and waits for the next token: not even the oldest goes before it."""
    bench = ShortestFirst(num_blocks=12, max_batch=4)
    bench.add(*[request(f"r{i}", [i + 1] * 7, max_tokens=24) for i in range(4)])
    while not bench.scheduler.num_preemptions:
        bench.step()
    preempted = [sequence.request.request_id for sequence in bench.scheduler.waiting]
    bench.answers["new"] = Answer()
    bench.loop.add(request("new", [60], max_tokens=1), submit_time=-1000.0)
    while preempted[-1] in [sequence.request.request_id for sequence in bench.scheduler.waiting]:
        assert bench.answers["new"].start is None
        bench.step()
    bench.serve()
    assert bench.answers["new"].reason is SequenceFinishReason.LENGTH


@pytest.mark.parametrize("seed", range(4))
def test_order_changes_no_answer_and_no_sequence_starves(seed: int) -> None:
    """Arrivals at any time, too few blocks, preemption: the same tokens as alone."""
    rng = random.Random(seed)
    common = [rng.randrange(1, VOCAB_SIZE) for _ in range(20)]
    requests = [
        request(
            f"r{i}",
            common[: rng.randrange(20)] + [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randrange(1, 30))],
            rng.randrange(1, 25),
        )
        for i in range(30)
    ]
    bench = ShortestFirst(num_blocks=24, max_batch=4, budget=rng.randrange(2, 30))
    todo = list(requests)
    while todo or bench.loop.has_work:
        if todo and rng.random() < 0.4:
            bench.add(todo.pop())
        bench.step()
    for each in requests:
        alone = ShortestFirst().run(each)[each.request_id]
        assert same(bench.answers[each.request_id], alone)
    assert bench.pool.num_available == bench.pool.num_blocks


async def test_the_simulated_engine_keeps_the_same_order() -> None:
    """Benchmarks of the fabric run on it. All come at the same time by its clock: a prompt of 400 tokens has patience
    for 4 ms, which is less than a busy machine may take between two submits."""
    config = ShardConfig(
        queue_order="shortest_prefill", max_batch=1, sim=SimConfig(step_ms=0, prefill_tokens_per_second=1e6)
    )
    engine = SimEngine("model", config, vocab_size=49152, clock=lambda: 0.0)
    for n in (400, 90, 300, 200):
        engine.submit(request(f"r{n}", [n] * n))
    order: list[str] = []
    async for output in engine.steps():
        order += [start.request_id for start in output.starts]
        if len(order) == 4:
            break
    await engine.close()
    assert order == ["r90", "r200", "r300", "r400"]
