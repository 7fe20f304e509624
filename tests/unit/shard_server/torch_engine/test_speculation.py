"""Speculation by prompt lookup changes when tokens come, never which."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_common.config import SpeculationConfig
from shard_server.engines.base import EngineRequest, SequenceFinishReason
from shard_server.engines.torch_engine.sampling.speculation import PromptLookup
from tests.examples import num_examples
from tests.fakes.fake_model_runner import FakeModelRunner
from tests.step_bench import Answer, StepBench, same
from tests.unit.shard_server.torch_engine.test_scheduler_steps import BLOCK_SIZE, make_request, various_requests

SPECULATION = SpeculationConfig(max_draft_tokens=6)


class Bench(StepBench):
    """A model whose answers repeat themselves, as its logits depend on the last token only."""

    def __init__(
        self,
        speculation: SpeculationConfig | None,
        *,
        num_blocks: int = 256,
        max_batch: int = 16,
        budget: int = 512,
        num_context_tokens: int | None = 1,
    ) -> None:
        self.runner = FakeModelRunner(block_size=BLOCK_SIZE, num_blocks=num_blocks)
        self.runner.num_context_tokens = num_context_tokens
        super().__init__(
            self.runner,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_batch=max_batch,
            budget=budget,
            speculation=speculation,
        )

    @property
    def num_accepted_tokens(self) -> int:
        return self.loop._load().num_accepted_tokens

    @property
    def num_draft_tokens(self) -> int:
        return self.loop._load().num_draft_tokens


def long_requests(count: int, seed: int = 1) -> list[EngineRequest]:
    """Greedy and drawn ones, penalties and logprobs, all long enough to repeat themselves."""
    return [
        dataclasses.replace(request, max_tokens=40 + index % 7)
        for index, request in enumerate(various_requests(count, seed))
    ]


def plain(request: EngineRequest, num_context_tokens: int | None = 1) -> Answer:
    return Bench(None, num_context_tokens=num_context_tokens).run(request)[request.request_id]


@pytest.mark.parametrize(
    ("num_blocks", "max_batch", "budget"),
    [
        pytest.param(512, 4, 512, id="batched"),
        pytest.param(512, 32, 5, id="chunked"),
        pytest.param(30, 16, 512, id="preempted"),
        pytest.param(512, 1, 512, id="alone"),
    ],
)
def test_tokens_and_logprobs_are_those_without_speculation(num_blocks: int, max_batch: int, budget: int) -> None:
    """Greedy and seeded, under penalties, beside others, with too few blocks: and drafts were right, so that their KV
    was used."""
    requests = long_requests(16)
    bench = Bench(SPECULATION, num_blocks=num_blocks, max_batch=max_batch, budget=budget)
    answers = bench.run(*requests)
    for request in requests:
        assert same(answers[request.request_id], plain(request)), request.request_id
    assert bench.num_draft_tokens > bench.num_accepted_tokens > 20
    assert (bench.scheduler.num_preemptions > 0) == (num_blocks == 30)
    assert bench.pool.num_available == num_blocks
    assert bench.replayed == bench.pool.cached_hashes


@pytest.mark.parametrize("seed", range(3))
def test_wrong_drafts_leave_no_trace(seed: int) -> None:
    """A model that never repeats itself behind prompts that do: every draft is wrong, and the KV it left in a block
    must neither be read nor cached."""
    rng = random.Random(seed)
    pattern = [rng.randrange(1, 61) for _ in range(5)]
    requests = [
        make_request(f"r{index}", pattern * rng.randrange(2, 6), 20, sampling=various_requests(8, seed)[index].sampling)
        for index in range(8)
    ]
    bench = Bench(SPECULATION, num_context_tokens=None)
    answers = bench.run(*requests)
    for request in requests:
        assert same(answers[request.request_id], plain(request, None)), request.request_id
    assert bench.num_draft_tokens > 0
    again = [dataclasses.replace(request, request_id=f"{request.request_id}-again") for request in requests]
    later = bench.run(*again)
    for request in requests:
        assert same(later[f"{request.request_id}-again"], plain(request, None))


def test_fewer_steps_for_an_answer_that_repeats_itself() -> None:
    """What it is for."""
    request = make_request("r", [5, 9, 5, 9, 5, 9], 60)
    without, with_it = Bench(None), Bench(SPECULATION)
    without.run(request)
    with_it.run(request)
    assert len(without.runner.batches) == 60
    assert len(with_it.runner.batches) < 30
    assert with_it.num_accepted_tokens >= 30


def test_a_stop_token_ends_the_answer_in_the_middle_of_a_draft() -> None:
    """What was drafted behind it must not be emitted, nor counted."""
    prompt = [5, *plain(make_request("r", [5], 40)).token_ids]  # it continues as it began
    whole = plain(make_request("r", prompt, 20)).token_ids
    stop = whole[2]
    assert stop not in whole[:2]
    request = make_request("r", prompt, 20, stop_token_ids=frozenset({stop}))
    bench = Bench(SPECULATION)
    answer = bench.run(request)["r"]
    assert answer.token_ids == whole[:3]
    assert bench.num_draft_tokens > 2
    assert answer.reason is SequenceFinishReason.STOP


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 10, 33])
def test_max_tokens_is_kept_to(max_tokens: int) -> None:
    """A draft must not overshoot the window that blocks were promised for."""
    request = make_request("r", [5, 9] * 6, max_tokens)
    bench = Bench(SPECULATION)
    answer = bench.run(request)["r"]
    assert len(answer.token_ids) == max_tokens
    longest = max(s.num_computed_tokens + len(s.token_ids) for batch in bench.runner.batches for s in batch)
    assert longest <= len(request.prompt_token_ids) + max_tokens


def test_a_step_has_a_bounded_number_of_rows() -> None:
    """Beyond that a matrix product takes longer, and drafts would slow everybody down."""
    requests = [make_request(f"r{index}", [5, 9, 5, 9, index + 1, 5, 9], 40) for index in range(20)]
    bench = Bench(SPECULATION, max_batch=20)
    bench.run(*requests)
    decoding = [batch for batch in bench.runner.batches if all(len(s.token_ids) == 1 + s.num_drafts for s in batch)]
    assert max(sum(len(s.token_ids) for s in batch) for batch in decoding) <= 32
    assert bench.num_accepted_tokens


def test_it_is_off_by_default() -> None:
    """Who has no repetitive texts should not pay for looking."""
    bench = Bench(None)
    bench.run(make_request("r", [5, 9] * 6, 30))
    assert bench.num_draft_tokens == 0


def reference_place(token_ids: list[int], max_ngram: int) -> int | None:
    """Where the longest suffix (of 2 to max_ngram tokens) that occurred before ended the last time."""
    for size in range(max_ngram, min(2, max_ngram) - 1, -1):
        for end in range(len(token_ids) - 1, size - 1, -1):
            if len(token_ids) > size and token_ids[end - size : end] == token_ids[-size:]:
                return end
    return None


@settings(max_examples=num_examples(150), deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=6),
    max_ngram=st.integers(1, 4),
)
def test_drafts_are_what_followed_the_last_time(pieces: list[list[int]], max_ngram: int) -> None:
    """However the tokens arrive: looked up incrementally, the longest and latest occurrence counts."""
    lookup = PromptLookup(5, max_ngram)
    token_ids: list[int] = []
    for piece in pieces:
        token_ids += piece
        place = reference_place(token_ids, max_ngram)
        expected: list[int] = []
        if place is not None:
            extended = list(token_ids)
            while len(expected) < 5:
                expected.append(extended[place + len(expected)])
                extended.append(expected[-1])
        assert lookup.draft(token_ids, 5) == expected


def test_drafts_get_shorter_after_misses_and_longer_after_hits() -> None:
    """A text that only looks repetitive must not cost a full draft at every step."""
    lookup = PromptLookup(8, 2)
    token_ids = [1, 2] * 20
    assert len(lookup.draft(token_ids, 16)) == 8
    lookup.on_verified(8, 0)
    assert len(lookup.draft(token_ids, 16)) == 1
    lookup.on_verified(1, 1)
    assert len(lookup.draft(token_ids, 16)) == 2
    lookup.on_verified(2, 2)
    lookup.on_verified(4, 4)
    assert len(lookup.draft(token_ids, 16)) == 8
    assert len(lookup.draft(token_ids, 3)) == 3
