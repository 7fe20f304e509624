"""Drawing tokens: exact distributions, fixed by (seed, position), the same whatever else is in the batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from shard_server.engines.base import Sampling, TokenLogprobs
from shard_server.engines.torch_engine.sampling.batched_draws import uniform
from shard_server.engines.torch_engine.sampling.sampler import Draws, SampleRow

VOCAB = 2000


@dataclasses.dataclass
class Drawn:
    token_ids: list[int | None]
    logprobs: dict[int, TokenLogprobs]


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Drawn:
    """Every row's token, and the logprobs of those that asked."""
    draws = Draws(logits)
    drawn = [draws.draw(index, row) for index, row in enumerate(rows)]
    return Drawn(
        [token_id for token_id, _ in drawn],
        {index: logprobs for index, (_, logprobs) in enumerate(drawn) if logprobs is not None},
    )


def logits_like_a_models(num_rows: int) -> torch.Tensor:
    """bf16-rounded, hence full of ties, as a model's are."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(num_rows, VOCAB, generator=generator) * 4).bfloat16().float()


def draw(logits: torch.Tensor, sampling: Sampling, position: int = 0, counts: dict[int, int] | None = None) -> int:
    token_id = sample(logits.reshape(1, -1), [SampleRow(sampling, position, counts)]).token_ids[0]
    assert token_id is not None
    return token_id


VARIETY = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_p=0.9, seed=2, num_logprobs=3),
    Sampling(temperature=1.3, top_k=40, seed=3),
    Sampling(temperature=0.9, top_k=50, top_p=0.5, seed=4, num_logprobs=0),
    Sampling(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5, num_logprobs=5),
    Sampling(temperature=2.0, top_p=0.9999, seed=5),
    Sampling(temperature=1.0, seed=6, presence_penalty=-2.0),
]


def test_a_row_is_drawn_alike_in_every_batch() -> None:
    """Failover rests on this: tokens and logprobs, bit for bit, alone, together and in any order."""
    logits = logits_like_a_models(len(VARIETY))
    rows = [SampleRow(s, i, {3: 2, 5: 1} if s.presence_penalty else None) for i, s in enumerate(VARIETY)]
    together = sample(logits, rows)
    backwards = sample(logits.flip(0), rows[::-1])
    assert backwards.token_ids[::-1] == together.token_ids
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], [row])
        assert alone.token_ids == [together.token_ids[i]]
        assert alone.logprobs.get(0) == together.logprobs.get(i) == backwards.logprobs.get(len(rows) - 1 - i)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_threads_do_not_change_a_row(num_threads: int) -> None:
    """A shard with more cores must continue a sequence as the first one would have."""
    before = torch.get_num_threads()
    logits = (torch.randn(1, 50_000, generator=torch.Generator().manual_seed(3)) * 3).bfloat16().float()
    rows = [SampleRow(Sampling(temperature=0.8, top_p=0.95, seed=9, num_logprobs=4), 5)]
    expected = sample(logits, rows)
    try:
        torch.set_num_threads(num_threads)
        assert sample(logits, rows) == expected
    finally:
        torch.set_num_threads(before)


def test_greedy_takes_the_first_of_equals() -> None:
    """Ties are common in bf16: who wins must not depend on the kernel."""
    logits = torch.zeros(3, VOCAB)
    logits[:, [17, 400, 1999]] = 2.0
    assert sample(logits, [SampleRow(Sampling(temperature=0.0), 0)] * 3).token_ids == [17, 17, 17]


def test_top_k_keeps_the_first_of_equals() -> None:
    """Exactly k tokens, with ties cut in the order of their ids."""
    logits = torch.zeros(VOCAB)
    logits[[5, 6, 7, 8]] = 3.0
    seen = {draw(logits, Sampling(top_k=2, seed=seed)) for seed in range(200)}
    assert seen == {5, 6}


def test_top_k_of_one_and_of_everything() -> None:
    """The edges of the range: one is greedy, all (or more than all) is no filter."""
    logits = logits_like_a_models(1)[0]
    assert draw(logits, Sampling(top_k=1, seed=5)) == int(logits.argmax())
    for seed in range(20):
        assert draw(logits, Sampling(top_k=VOCAB + 1, seed=seed)) == draw(logits, Sampling(seed=seed))


@pytest.mark.parametrize("top_p", [1e-9, 0.1, 0.5, 0.9, 0.999, 0.999999])
def test_the_nucleus_is_that_of_a_full_sort(top_p: float) -> None:
    """The shortcut that sorts only the likely tokens must be exact, on peaked and on flat distributions."""
    for scale in (0.01, 1.0, 8.0):
        logits = logits_like_a_models(1)[0] * scale
        ordered, order = logits.softmax(-1).double().sort(descending=True, stable=True)
        size = int((ordered.cumsum(-1) < top_p).sum()) + 1
        nucleus = set(order[:size].tolist())
        seen = {draw(logits, Sampling(top_p=top_p, seed=seed)) for seed in range(150)}
        assert seen <= nucleus
        assert len(seen) > 1 or float(ordered[0]) > 0.9 * top_p


def test_frequencies_follow_the_probabilities() -> None:
    """Chi-squared over 4,000 draws; the seeds are fixed, so it passes always or never."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    num_draws = 4000
    observed = torch.zeros(5)
    for position in range(num_draws):
        observed[draw(logits, Sampling(temperature=0.8, seed=11), position)] += 1
    expected = (logits / 0.8).softmax(-1) * num_draws
    assert float(((observed - expected) ** 2 / expected).sum()) < 13.3  # 1% level at 4 degrees of freedom


def test_random_numbers_are_a_function_of_seed_and_position() -> None:
    """Pinned values: a changed generator would break every resumed answer of a mixed fleet."""
    assert [uniform(0, 0), uniform(0, 1), uniform(2**64 - 1, 10**6)] == [
        0.6524484863740322,
        0.49050645623222144,
        0.07565152216319326,
    ]
    numbers = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02


def test_penalties_look_at_output_tokens_only() -> None:
    """OpenAI's definition: presence once, frequency per occurrence, nothing for the prompt."""
    logits = torch.zeros(VOCAB)
    logits[[10, 20]] = torch.tensor([3.0, 2.5])
    sampling = Sampling(temperature=0.0, presence_penalty=0.25, frequency_penalty=0.2)
    assert draw(logits, sampling, counts={}) == 10
    assert draw(logits, sampling, counts={10: 1}) == 10  # 3.0 - 0.45 still wins
    assert draw(logits, sampling, counts={10: 2}) == 20


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Before temperature and penalties, of the chosen token, and the likeliest first."""
    logits = logits_like_a_models(1)
    sampling = Sampling(temperature=0.5, top_k=3, seed=4, frequency_penalty=1.0, num_logprobs=4)
    drawn = sample(logits, [SampleRow(sampling, 2, {7: 3})])
    expected = logits[0].log_softmax(-1)
    token_id = drawn.token_ids[0]
    assert token_id is not None
    assert drawn.logprobs[0].logprob == float(expected[token_id])
    values = [value for _, value in drawn.logprobs[0].top]
    assert values == sorted(expected.tolist(), reverse=True)[:4]
    assert all(float(expected[token]) == value for token, value in drawn.logprobs[0].top)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_their_row_alone(bad: float) -> None:
    """A sequence that broke the model must not end in a random token, nor take its neighbours with it."""
    logits = logits_like_a_models(3)
    logits[1, 100] = bad
    rows = [SampleRow(Sampling(seed=1, num_logprobs=1), 0)] * 3
    drawn = sample(logits, rows)
    assert drawn.token_ids[1] is None
    assert drawn.token_ids[0] is not None
    assert set(drawn.logprobs) == {0, 2}


def test_a_tiny_temperature_is_greedy() -> None:
    """It must neither overflow nor draw at random."""
    logits = logits_like_a_models(1)[0]
    logits[42] = 30.0
    assert {draw(logits, Sampling(temperature=1e-30, seed=seed)) for seed in range(5)} == {42}


def bits(*token_ids: int) -> np.ndarray:
    allowed = np.zeros(VOCAB, dtype=np.uint8)
    allowed[list(token_ids)] = 1
    return np.packbits(allowed, bitorder="little")


@pytest.mark.parametrize("sampling", VARIETY)
def test_a_mask_leaves_only_its_tokens_and_the_raw_logprobs(sampling: Sampling) -> None:
    """Guided decoding: whatever the sampling, what the mask forbids is never drawn, and logprobs are not touched."""
    logits = logits_like_a_models(1)
    mask = bits(3, 5, 700, 1999)
    counts = {3: 2} if sampling.presence_penalty else None
    for position in range(20):
        token_id, logprobs = Draws(logits).draw(0, SampleRow(sampling, position, counts, mask))
        assert token_id in (3, 5, 700, 1999)
        if logprobs is not None:
            assert logprobs.logprob == float(logits[0].log_softmax(-1)[token_id])
    only = SampleRow(sampling, 0, counts, bits(1234))
    assert Draws(logits).draw(0, only)[0] == 1234


def test_a_mask_draws_from_the_renormalised_distribution() -> None:
    """As if the forbidden tokens did not exist: the same number falls on the same share."""
    logits = logits_like_a_models(1)
    allowed = [4, 90, 800, 801, 1500]
    masked = torch.full_like(logits, -math.inf)
    masked[0, allowed] = logits[0, allowed]
    for seed in range(50):
        sampling = Sampling(temperature=1.0, seed=seed)
        expected = Draws(masked).draw(0, SampleRow(sampling, 0))[0]
        assert Draws(logits).draw(0, SampleRow(sampling, 0, None, bits(*allowed)))[0] == expected


def test_masks_leave_other_rows_alone() -> None:
    """An unguided neighbour draws what it would have drawn."""
    logits = logits_like_a_models(3)
    rows = [SampleRow(Sampling(seed=8, num_logprobs=2), 4) for _ in range(3)]
    expected = sample(logits, rows)
    rows[1].mask = bits(7)
    drawn = sample(logits, rows)
    assert drawn.token_ids == [expected.token_ids[0], 7, expected.token_ids[2]]
    assert drawn.logprobs[0] == expected.logprobs[0]


def test_a_mask_that_forbids_everything_gives_no_token() -> None:
    """Better the end of the sequence than a token at random."""
    assert Draws(logits_like_a_models(1)).draw(0, SampleRow(Sampling(), 0, None, bits())) == (None, None)
