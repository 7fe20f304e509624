"""Which log-probabilities of a prompt may be asked for, and what that leaves to the prefix cache."""

from __future__ import annotations

import pytest

from kvloom.errors import KvloomError
from kvloom.sampling import MAX_PROMPT_LOGPROBS, check_prompt_logprobs, check_stop, max_cached_tokens
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions


def test_only_those_that_are_reported_count_against_the_limit() -> None:
    """A short answer to a long prompt can be scored, although all log-probabilities would be too many."""
    num_tokens = MAX_PROMPT_LOGPROBS + 10
    check_prompt_logprobs(SamplingParams(prompt_logprobs=0, prompt_logprobs_start=10), num_tokens, 1)
    with pytest.raises(KvloomError, match="at most 131072"):
        check_prompt_logprobs(SamplingParams(prompt_logprobs=0, prompt_logprobs_start=9), num_tokens, 1)


def test_a_start_behind_the_prompt_is_refused_by_its_name() -> None:
    """It is a mistake of the caller, who would otherwise wait for log-probabilities that never come."""
    for start in (5, 2**32 - 1):
        with pytest.raises(KvloomError) as raised:
            check_prompt_logprobs(SamplingParams(prompt_logprobs=1, prompt_logprobs_start=start), 5, 1)
        assert raised.value.field == "sampling.prompt_logprobs_start"
    for sampling in (SamplingParams(prompt_logprobs=1, prompt_logprobs_start=4), SamplingParams(prompt_logprobs=1)):
        check_prompt_logprobs(sampling, 5, 1)
    check_prompt_logprobs(SamplingParams(prompt_logprobs=1), 1, 1)
    check_prompt_logprobs(SamplingParams(prompt_logprobs_start=9), 5, 1)  # without effect


def test_the_token_before_the_first_reported_one_is_computed() -> None:
    """Its logits give that one's log-probability."""
    assert max_cached_tokens(SamplingParams(prompt_logprobs_start=9)) is None
    for start, expected in ((0, 0), (1, 0), (2, 1), (40, 39)):
        assert max_cached_tokens(SamplingParams(prompt_logprobs=0, prompt_logprobs_start=start)) == expected


@pytest.mark.parametrize(("openings", "closings"), [(["a"] * 9, ["b"]), ([""], ["b"]), (["a"], ["b" * 257])])
def test_markers_of_reasoning_are_bounded(openings: list[str], closings: list[str]) -> None:
    """They are looked for in all text of the answer."""
    stop = StopConditions(stop=["x"])
    stop.reasoning.openings[:], stop.reasoning.closings[:] = openings, closings
    with pytest.raises(KvloomError, match=r"stop\.reasoning\.") as raised:
        check_stop(stop, "stop.")
    assert raised.value.field.startswith("stop.reasoning.")
