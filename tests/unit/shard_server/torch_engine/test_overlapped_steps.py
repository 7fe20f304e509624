"""On a device the next step begins before the tokens of this one are known. Whatever they turn out to be, the answers
are those of steps in turn. (Batching, preemption, arrivals, cancels: test_scheduler_steps.py.)"""

from __future__ import annotations

import dataclasses
import random
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from kvloom_common.config import SpeculationConfig
from shard_server.engines.base import EngineRequest, Pooling, PoolingKind, Sampling, SequenceFinishReason
from shard_server.engines.torch_engine.model_runner import ScheduledSequence
from shard_server.engines.torch_engine.sampling.adjustments import LogitAdjustments
from shard_server.engines.torch_engine.sampling.device_draws import DeviceDraws
from shard_server.engines.torch_engine.sampling.guides import GuideError
from shard_server.engines.torch_engine.sampling.sampler import Draws, SampleRow
from shard_server.engines.torch_engine.warm_up import warm_up
from tests.fakes.fake_model_runner import VOCAB_SIZE, FakeDeviceRunner, FakeModelRunner
from tests.step_bench import Answer, StepBench, same
from tests.unit.shard_server.torch_engine.test_scheduler_steps import BLOCK_SIZE, Bench, make_request

NUM_BLOCKS = 200


class ParityGuide:
    """Even and odd tokens in turn; ends after `length` tokens, or fails at the one after `fails_after`."""

    def __init__(self, length: int, fails_after: int = 1000) -> None:
        self.taken: list[int] = []
        self.is_complete = False
        self._length, self._fails_after = length, fails_after
        self._mask = np.zeros(-(-VOCAB_SIZE // 8), np.uint8)

    def mask(self) -> np.ndarray:
        if len(self.taken) >= self._fails_after:
            raise GuideError("a dead end")
        self._mask[:] = 0b10101010 if len(self.taken) % 2 else 0b01010100
        return self._mask

    def take(self, token_ids: tuple[int, ...]) -> bool:
        self.taken += token_ids
        self.is_complete = len(self.taken) >= self._length
        return True


def requests_of_all_kinds(seed: int, count: int = 24) -> list[EngineRequest]:
    rng = random.Random(seed)
    common = rng.choices(range(1, VOCAB_SIZE), k=19)
    requests: list[EngineRequest] = []
    for index in range(count):
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.0, 0.8, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 10]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.randrange(2**64),
            presence_penalty=rng.choice([0.0, 0.8]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            logit_bias=rng.choice([(), ((5, 3.0), (9, -4.0))]),
            num_logprobs=rng.choice([None, None, 0, 3]),
            num_prompt_logprobs=rng.choice([None] * 9 + [1]),
        )
        prompt = common[: rng.randrange(20)] + rng.choices(range(1, VOCAB_SIZE), k=rng.randrange(1, 20))
        stops = frozenset(rng.choices(range(1, VOCAB_SIZE), k=6)) if index % 3 == 0 else frozenset()
        changes: dict[str, Any] = {"stop_token_ids": stops, "min_tokens": rng.choice([0, 4]) if stops else 0}
        if index % 11 == 10:
            changes["predicted_token_ids"] = rng.choices(range(1, VOCAB_SIZE), k=6)
        requests.append(make_request(f"r{index}", prompt, rng.randrange(1, 25), sampling=sampling, **changes))
    pooled = dataclasses.replace(requests[-1], sampling=Sampling(), max_tokens=0, pooling=Pooling(PoolingKind.MEAN))
    return [*requests[:-1], pooled]


def answers_of(requests: list[EngineRequest], *, overlaps: bool, seed: int, **options: Any) -> dict[str, Answer]:
    """The answers to requests of which every fifth is guided, arriving over time."""
    make = FakeDeviceRunner if overlaps else FakeModelRunner
    bench = StepBench(
        make(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, **options
    )
    rng = random.Random(seed)
    for index, request in enumerate(requests):
        guides: dict[str, Future[Any]] = {}
        if index % 5 == 4 and request.pooling is None:
            guides[request.request_id] = Future()
            guides[request.request_id].set_result(ParityGuide(7, 3 if index % 10 == 9 else 1000))
        bench.add(request, guides=guides)
        for _ in range(rng.randrange(3)):
            bench.step()
    answers = bench.run()
    assert bench.pool.num_available == NUM_BLOCKS
    assert bench.replayed == bench.pool.cached_hashes
    return answers


@pytest.mark.parametrize(
    "options", [{}, {"budget": 7}, {"speculation": SpeculationConfig(max_draft_tokens=4)}], ids=str
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 12))])
def test_answers_are_those_of_steps_in_turn(seed: int, options: dict[str, Any]) -> None:
    """Stop tokens, lengths, masks, dead ends of guides, penalties, bias, logprobs of answers and prompts, embeddings
    and predictions in one batch: tokens, logprobs and ends to the bit."""
    requests = requests_of_all_kinds(seed)
    overlapped = answers_of(requests, overlaps=True, seed=seed, **options)
    expected = answers_of(requests, overlaps=False, seed=seed, **options)
    for name, answer in overlapped.items():
        assert same(answer, expected[name]), name
        assert (answer.error, answer.embedding) == (expected[name].error, expected[name].embedding)
        if answer.start is not None:
            other = expected[name].start
            assert other is not None
            assert answer.start.prompt_logprobs == other.prompt_logprobs
    reasons = {answer.reason for answer in expected.values()}
    assert reasons == {SequenceFinishReason.STOP, SequenceFinishReason.LENGTH, SequenceFinishReason.ERROR}


def test_the_next_step_is_given_to_the_device_before_this_ones_tokens_are_read() -> None:
    """Otherwise the device waits while the CPU reads, reports and plans: a fifth of the time with many streams. A
    request with logprobs, penalties or a mask must not stop that for the others."""
    bench = Bench(overlaps=True)
    penalty = Sampling(presence_penalty=1.0, num_logprobs=2)
    bench.add(make_request("a", [1, 2, 3], 9), make_request("b", [4, 5], 9, sampling=penalty))
    assert bench.step() is None
    for num_known in range(1, 9):
        bench.step()
        assert len(bench.runner.batches) == num_known + 1
        assert [len(answer.token_ids) for answer in bench.answers.values()] == [num_known] * 2
    bench.step()
    assert len(bench.runner.batches) == 9, "the ninth token of both is the last one: that is known beforehand"
    assert not bench.loop.has_work


def test_no_token_follows_the_end_and_its_blocks_are_free() -> None:
    """The step after a stop token is running already when the token is read."""
    tokens = Bench().run(make_request("a", [5, 6, 7], 20))["a"].token_ids
    stop = next(token for index, token in enumerate(tokens) if index > 2 and token not in tokens[:index])
    bench = Bench(overlaps=True)
    bench.add(make_request("a", [5, 6, 7], 20, stop_token_ids=frozenset({stop})), make_request("b", [8], 20))
    while bench.answers["a"].reason is None:
        bench.step()
    assert bench.answers["a"].token_ids == tokens[: tokens.index(stop) + 1]
    assert bench.answers["a"].reason is SequenceFinishReason.STOP
    assert len(bench.runner.batches[-1]) == 2, "a row that nobody reads"
    assert bench.pool.num_blocks - bench.pool.num_available == len(bench.scheduler.running[0].block_table)
    bench.step()
    assert len(bench.runner.batches[-1]) == 1


def test_a_request_id_can_be_used_again_while_the_old_ones_row_is_computed() -> None:
    """A client that retries after it gave up must not get a token of the first attempt."""
    bench = Bench(overlaps=True)
    bench.add(make_request("a", [1, 2, 3], 9))
    bench.step()
    bench.loop.cancel("a")
    cancelled = bench.step()
    assert cancelled is not None
    assert [end.reason for end in cancelled.ends] == [SequenceFinishReason.CANCELLED]
    again = make_request("a", [9, 9, 4], 9)
    assert same(bench.run(again)["a"], Bench().run(again)["a"])


def test_memory_that_runs_out_while_tokens_are_drawn_costs_the_newest_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is computed then, but nothing counts: it is computed again without the newest."""
    bench = Bench(overlaps=True)
    requests = [make_request(f"r{i}", [i + 1] * 6, 8) for i in range(3)]
    bench.add(*requests)
    for _ in range(3):
        bench.step()
    amax = torch.Tensor.amax
    faults = [torch.OutOfMemoryError("CUDA out of memory")]

    def fail_once(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if faults:
            raise faults.pop()
        return amax(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "amax", fail_once)
    answers = bench.run()
    assert answers["r2"].reason is SequenceFinishReason.ERROR
    for request in requests[:2]:
        assert same(answers[request.request_id], Bench().run(request)[request.request_id])


def test_the_warm_up_waits_for_what_it_measures() -> None:
    """A device returns at once. The time that it takes to be asked would be a speed that no step has, and by which
    routers plan."""
    bench = Bench(num_blocks=256, budget=200, overlaps=True)
    owed_seconds = 0.0

    class Pending(torch.Tensor):
        """Logits that are not computed yet: whoever reads them waits for them."""

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal owed_seconds
            if function in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy):
                bench.clock, owed_seconds = bench.clock + owed_seconds, 0.0
            return super().__torch_function__(function, types, args, kwargs or {})

    class Device(FakeDeviceRunner):
        def run(self, batch: list[ScheduledSequence]) -> torch.Tensor:
            nonlocal owed_seconds
            owed_seconds += 0.001 * sum(len(one.token_ids) for one in batch)
            return super().run(batch).as_subclass(Pending)

    runner = Device(block_size=BLOCK_SIZE, num_blocks=256)
    speed = warm_up(runner, bench.scheduler, 199, runner.drawn_tokens, lambda: bench.clock)
    assert speed.prefill_tokens_per_second == pytest.approx(1000.0)
    assert speed.decode_step_seconds == pytest.approx(0.001)


SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.7, seed=2**63 + 5, num_logprobs=4),
    Sampling(temperature=0.8, top_p=0.9, seed=4, num_logprobs=0),
    Sampling(temperature=1.0, top_k=40, top_p=0.5, seed=7),
    Sampling(temperature=0.9, min_p=0.08, seed=10),
    Sampling(temperature=0.0, num_logprobs=2),
]


@pytest.mark.parametrize("vocab_size", [61, 3000])
@pytest.mark.parametrize("step", [1.0, 1e-6], ids=["ties", "distinct"])
def test_rows_drawn_on_a_device_get_the_tokens_and_logprobs_of_rows_alone(vocab_size: int, step: float) -> None:
    """With every combination of parameters, masks and adjustments, also where logits are equal."""
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(np.round(rng.standard_normal((84, vocab_size)) * 3 / step).astype(np.float32) * step)
    rows: list[SampleRow] = []
    for index in range(len(logits)):
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        mask, adjustments = None, None
        if index // 7 % 2:
            mask = np.packbits(rng.random(vocab_size) < 0.3, bitorder="little")
        if index // 14 % 3:
            sampling = dataclasses.replace(
                sampling, presence_penalty=0.7, repetition_penalty=1.3, logit_bias=((3, 2.0), (4, -1.0))
            )
            tokens = rng.integers(0, vocab_size, 6).tolist()
            stops = frozenset({1, 2, 1000})
            request = EngineRequest("", tokens[:3], sampling, 9, stops, output_token_ids=tokens[3:], min_tokens=5)
            adjustments = LogitAdjustments(request)
            if index % 14 == 7:  # the guide allows nothing but a stop token
                mask = np.zeros(-(-vocab_size // 8), np.uint8)
                mask[0] = 0b10
        rows.append(SampleRow(sampling, 3, adjustments, mask))
    rows[80].mask = np.zeros(-(-vocab_size // 8), np.uint8)
    logits[81, 5] = torch.nan
    logits[82] = torch.inf
    drawn_tokens = torch.zeros(100, dtype=torch.int64)
    drawn = DeviceDraws(logits, rows, drawn_tokens).read()
    alone = Draws(logits)
    expected = [alone.draw(index, row) for index, row in enumerate(rows)]
    assert drawn == expected
    assert [one for one, _ in expected][80:83] == [None] * 3
    assert drawn_tokens[: len(rows)].tolist() == [one or 0 for one, _ in expected]
