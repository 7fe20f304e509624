"""Drawing tokens: exact distributions, fixed by (seed, position), the same whatever else is in the batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from shard_server.engines.base import EngineRequest, Sampling, TokenLogprobs
from shard_server.engines.torch_engine.sampling.adjustments import LogitAdjustments
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


def test_rows_that_no_token_is_drawn_from_change_nothing() -> None:
    """The rows of a prompt's logprobs lie between those that tokens are drawn from."""
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(5))
    logits[2] = math.inf
    some, all_rows = Draws(logits, [1, 4]), Draws(logits)
    for index in (1, 4):
        row = SampleRow(Sampling(temperature=0.0, num_logprobs=1), 0)
        assert some.draw(index, row) == all_rows.draw(index, row)
    assert some.logprobs(3, 7, 2) == all_rows.logprobs(3, 7, 2)
    assert Draws(logits, []).logprobs(0, 7, 0) == all_rows.logprobs(0, 7, 0)


def adjustments(
    sampling: Sampling, output: Sequence[int] = (), prompt: Sequence[int] = (1,), **fields: Any
) -> LogitAdjustments | None:
    """Those of a sequence with this prompt and output."""
    return LogitAdjustments.of(EngineRequest("a", prompt, sampling, 100, output_token_ids=output, **fields))


def logits_like_a_models(num_rows: int) -> torch.Tensor:
    """bf16-rounded, hence full of ties, as a model's are."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(num_rows, VOCAB, generator=generator) * 4).bfloat16().float()


def draw(logits: torch.Tensor, sampling: Sampling, position: int = 0, output: Sequence[int] = (), **fields: Any) -> int:
    row = SampleRow(sampling, position, adjustments(sampling, output, **fields))
    token_id = sample(logits.reshape(1, -1), [row]).token_ids[0]
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
    Sampling(temperature=1.0, seed=7, min_p=0.1, num_logprobs=2),
    Sampling(temperature=0.8, top_k=9, top_p=0.9, seed=8, min_p=0.02, repetition_penalty=1.3),
    Sampling(temperature=0.0, logit_bias=((3, 5.0), (9, -100.0)), repetition_penalty=0.7),
]


def test_a_row_is_drawn_alike_in_every_batch() -> None:
    """Failover rests on this: tokens and logprobs, bit for bit, alone, together and in any order."""
    logits = logits_like_a_models(len(VARIETY))
    rows = [SampleRow(s, i, adjustments(s, [3, 5, 3], [7, 9])) for i, s in enumerate(VARIETY)]
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
    assert draw(logits, sampling, prompt=[10, 10, 10]) == 10
    assert draw(logits, sampling, output=[10]) == 10  # 3.0 - 0.45 still wins
    assert draw(logits, sampling, output=[10, 10]) == 20


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Before temperature and penalties, of the chosen token, and the likeliest first."""
    logits = logits_like_a_models(1)
    sampling = Sampling(temperature=0.5, top_k=3, seed=4, frequency_penalty=1.0, num_logprobs=4)
    drawn = sample(logits, [SampleRow(sampling, 2, adjustments(sampling, [7, 7, 7]))])
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
    adjusted = adjustments(sampling, [3, 3])
    for position in range(20):
        token_id, logprobs = Draws(logits).draw(0, SampleRow(sampling, position, adjusted, mask))
        assert token_id in (3, 5, 700, 1999)
        if logprobs is not None:
            assert logprobs.logprob == float(logits[0].log_softmax(-1)[token_id])
    only = SampleRow(sampling, 0, adjusted, bits(1234))
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


def reference_distribution(
    logits: torch.Tensor, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> dict[int, float]:
    """Probability by token, written down naively from the definitions: bias, repetition, presence and frequency,
    temperature, min_p, top_k, top_p, each on a list of Python numbers."""
    values = logits.tolist()
    for token_id, bias in sampling.logit_bias:
        values[token_id] += bias
    for token_id in {*prompt, *output}:
        factor = sampling.repetition_penalty
        values[token_id] = values[token_id] / factor if values[token_id] > 0 else values[token_id] * factor
    for token_id in set(output):
        values[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token_id)
    best = max(values)
    weights = {i: math.exp((value - best) / sampling.temperature) for i, value in enumerate(values)}
    weights = {i: weight for i, weight in weights.items() if weight >= sampling.min_p}
    ranked = sorted(weights, key=lambda i: -weights[i])[: sampling.top_k or None]
    total, mass, nucleus = sum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        if mass >= sampling.top_p * total:
            break
        nucleus.append(i)
        mass += weights[i]
    return {i: weights[i] / mass for i in nucleus}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(min_p=0.2),
        Sampling(min_p=1.0),
        Sampling(temperature=1.7, min_p=0.05, top_p=0.8),
        Sampling(temperature=0.6, min_p=0.001, top_k=4),
        Sampling(repetition_penalty=1.8),
        Sampling(repetition_penalty=0.5, presence_penalty=0.7, frequency_penalty=0.3),
        Sampling(logit_bias=((0, 4.0), (3, -100.0), (11, 1.5)), repetition_penalty=1.2),
        Sampling(temperature=0.9, logit_bias=((5, -3.0),), min_p=0.03, top_k=8, top_p=0.95, presence_penalty=-0.4),
    ],
)
def test_draws_follow_a_naive_reference(sampling: Sampling) -> None:
    """The order of the operations matters, and is that of other servers; the seeds are fixed, so this always passes."""
    logits = torch.tensor([1.5, -0.5, 2.0, 2.5, 0.1, 0.8, -1.0, 1.1, 0.0, -2.0, 0.4, 0.9])
    prompt, output = [2, 6, 2, 8], [3, 1, 3]
    expected = reference_distribution(logits, sampling, prompt, output)
    num_draws = 3000
    seen: dict[int, int] = dict.fromkeys(expected, 0)
    row = SampleRow(sampling, 0, adjustments(sampling, output, prompt))
    draws = Draws(logits[None])
    for seed in range(num_draws):
        row.sampling = dataclasses.replace(sampling, seed=seed)
        token_id, _ = draws.draw(0, row)
        assert token_id in expected
        seen[token_id] += 1
    for token_id, probability in expected.items():
        spread = math.sqrt(probability * (1 - probability) / num_draws)
        assert abs(seen[token_id] / num_draws - probability) <= 4.5 * spread + 1e-9, token_id


def test_penalties_equal_the_logits_processors_of_transformers() -> None:
    """The definition that models were tuned with, where that library is installed."""
    transformers = pytest.importorskip("transformers")
    logits = logits_like_a_models(1)
    prompt, output = [4, 9, 1500, 4], [9, 30]
    sampling = Sampling(temperature=0.0, repetition_penalty=1.3)
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[*prompt, *output]]), logits.clone())
    adjusted = adjustments(sampling, output, prompt)
    assert adjusted is not None
    assert torch.equal(adjusted.apply(logits[0], 2), expected[0])


def test_a_request_without_adjustments_has_none() -> None:
    """The rows of ordinary requests must not be copied."""
    assert adjustments(Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1), [1, 2]) is None


def test_stop_tokens_wait_for_min_tokens() -> None:
    """They are never drawn before, however likely, and unknown ones change nothing."""
    logits = torch.zeros(VOCAB)
    logits[[2, 50]] = 40.0
    fields = {"stop_token_ids": frozenset({2, 50, VOCAB + 7}), "min_tokens": 3}
    for sampling in (Sampling(temperature=0.0), Sampling(seed=3), Sampling(seed=3, min_p=0.5, top_k=4)):
        assert all(draw(logits, sampling, position, **fields) not in (2, 50) for position in range(3))
        assert draw(logits, sampling, 3, **fields) in (2, 50)


def test_a_guide_has_precedence_over_min_tokens() -> None:
    """Where the guide is complete, only a stop token can follow; where it is not, the stop token waits."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 9.0
    sampling = Sampling(temperature=0.0)
    adjusted = adjustments(sampling, stop_token_ids=frozenset({2}), min_tokens=5)
    assert Draws(logits).draw(0, SampleRow(sampling, 1, adjusted, bits(2)))[0] == 2
    assert Draws(logits).draw(0, SampleRow(sampling, 1, adjusted, bits(2, 77)))[0] == 77
