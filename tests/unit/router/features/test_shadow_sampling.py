"""Which answers are sampled for shadow traffic, and what a candidate is asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom_common.config import ConfigError, ShadowConfig
from router.core.events import SHADOW_CLIENT_ID, ChoiceSpec, Request, TierRank
from router.features.shadow.sampling import (
    Sample,
    check_shadows,
    generating_request,
    is_sampled,
    scoring_request,
    with_logprobs,
)


def shadow(share: float, candidate: str = "b") -> ShadowConfig:
    return ShadowConfig(model="a", candidate=candidate, share=share)


def sample(**fields: object) -> Sample:
    request = Request("r", "c", "a", [1, 2], "text", (ChoiceSpec(7, 0),), tenant="t", traceparent="trace", **fields)
    return Sample(request, [3, 4], 1.5, 0.0)


@given(st.text(max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_samples_all_that_a_smaller_one_does(request_id: str, one: float, other: float) -> None:
    """A share that grows keeps its answers, and all and none mean what they say, for any request id."""
    low, high = sorted((one, other))
    assert is_sampled(request_id, shadow(high)) or not is_sampled(request_id, shadow(low))
    assert is_sampled(request_id, shadow(1.0))
    assert not is_sampled(request_id, shadow(0.0))


def test_the_share_is_that_of_the_requests_and_pairs_differ() -> None:
    """Two candidates must not always have the same answers, nor none in common."""
    ids = [f"request-{number}" for number in range(4000)]
    b, c = ({name for name in ids if is_sampled(name, shadow(0.25, to))} for to in ("b", "c"))
    for found, wanted in ((b, 1000), (c, 1000), (b & c, 250)):
        assert abs(len(found) - wanted) < 120


def test_pairs_must_make_sense() -> None:
    """A mistake in the configuration is named when the router starts, not counted in vain."""
    with pytest.raises(ConfigError, match="its own candidate"):
        check_shadows([shadow(0.1, "a")])
    with pytest.raises(ConfigError, match="two have the model 'a'"):
        check_shadows([shadow(0.1), shadow(0.2)])
    check_shadows([shadow(0.1), shadow(0.2, "c")])


def test_a_scoring_request_is_one_prefill_of_prompt_and_answer() -> None:
    """Everything that would let it be taken for the caller's request is left behind."""
    request = scoring_request(sample(timeout_seconds=1.0, client_request_id="mine"), "b", 5, 9)
    assert list(request.prompt_token_ids) == [1, 2, 3, 4]
    assert (request.model, request.max_tokens, request.choices[0].slot) == ("b", 1, 9)
    assert isinstance(request.sampling, SamplingParams)
    assert request.sampling.HasField("prompt_logprobs")
    assert (request.sampling.prompt_logprobs_start, request.max_cached_tokens) == (2, 1)
    assert (request.client_id, request.tier) == (SHADOW_CLIENT_ID, TierRank.SHADOW)
    assert (request.traceparent, request.client_request_id, request.prompt_text) == ("", "", "")
    assert request.tenant not in ("", "t")


def test_a_generating_request_fits_its_limit() -> None:
    """The candidate must not answer longer than the limit allows, however long the model was allowed to."""
    sampling = SamplingParams(temperature=0.5, seed=4, logprobs=3, prompt_logprobs=1, prompt_logprobs_start=1)
    sampling.predicted_token_ids.append(1)
    stop = StopConditions(stop=["x"], min_tokens=50)
    for asked, wanted in ((None, 18), (100, 18), (5, 5)):
        given_up = sample(sampling=sampling, stop=stop, max_tokens=asked)
        request = generating_request(given_up, "b", 20, 5, 9)
        assert request.max_tokens == wanted
        assert request.sampling == SamplingParams(temperature=0.5, seed=4)
        assert request.stop == StopConditions(stop=["x"], min_tokens=wanted)
    assert sampling.logprobs == 3, "the caller's request was changed"


def test_logprobs_are_asked_for_in_a_copy() -> None:
    """The caller's message may be kept elsewhere, for example for a resumed answer."""
    sampling = SamplingParams(seed=4)
    request = with_logprobs(sample(sampling=sampling).request)
    assert request.sampling == SamplingParams(seed=4, logprobs=0)
    assert not sampling.HasField("logprobs")
