"""Decides which answers are sampled, what is kept of them, and the requests that candidates get. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec
import xxhash

from kvloom.sampling import max_cached_tokens, with_chosen_logprobs
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom_common.config import ConfigError, ShadowConfig
from router.core.events import SHADOW_CLIENT_ID, SHADOW_TENANT, ChoiceSpec, Request, TierRank

TIMEOUT_SECONDS: Final = 60.0
"""How long a candidate may take."""
_HASH_RANGE: Final = 2.0**64


class Sample(msgspec.Struct, frozen=True, gc=False):
    """A sampled answer that has ended."""

    request: Request
    token_ids: Sequence[int]
    """The tokens of the answer, as delivered."""
    surprisal: float
    """The sum of -log p over them under the model that served them, in nats. 0 if it was not wanted."""
    ended_at: float

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and answer."""
        return len(self.request.prompt_token_ids) + len(self.token_ids)


def check_shadows(shadows: Sequence[ShadowConfig]) -> None:
    """Raises ConfigError if a pair is named twice, or compares a model with itself."""
    pairs: set[tuple[str, str]] = set()
    for shadow in shadows:
        pair = shadow.model, shadow.candidate
        if shadow.model == shadow.candidate:
            raise ConfigError(f"shadows: {shadow.model!r} is its own candidate")
        if pair in pairs:
            raise ConfigError(f"shadows: two have the model {shadow.model!r} and the candidate {shadow.candidate!r}")
        pairs.add(pair)


def is_sampled(request_id: str, shadow: ShadowConfig) -> bool:
    """By a stable hash, for which each pair has another seed: two candidates need not have the same answers."""
    seed = xxhash.xxh3_64_intdigest(f"{shadow.model}\0{shadow.candidate}".encode())
    return xxhash.xxh3_64_intdigest(request_id.encode("utf-8", "replace"), seed) < shadow.share * _HASH_RANGE


def with_logprobs(request: Request) -> Request:
    """The same request, whose tokens come with their log-probabilities."""
    sampling = request.sampling if isinstance(request.sampling, SamplingParams) else SamplingParams()
    return msgspec.structs.replace(request, sampling=with_chosen_logprobs(sampling))


def scoring_request(sample: Sample, candidate: str, number: int, slot: int) -> Request:
    """Asks for the log-probabilities of the answer's tokens after the prompt, by one prefill."""
    token_ids = array("I", sample.request.prompt_token_ids)
    start = len(token_ids)
    token_ids.extend(sample.token_ids)
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=start, seed=0)
    return _shadow_request(
        sample, candidate, number, slot, prompt_token_ids=token_ids, max_tokens=1, sampling=sampling, stop=None
    )


def reading_callers_cache(sample: Sample, request: Request) -> Request:
    """The same request, which uses what the caller's own requests have left in the candidate's prefix cache. As it
    leaves nothing there itself, they do not notice it."""
    return msgspec.structs.replace(request, cache_salt=sample.request.cache_salt, discards_blocks=True)


def generating_request(sample: Sample, candidate: str, max_tokens: int, number: int, slot: int) -> Request:
    """Asks for another answer to the same prompt, with the same seed."""
    request = sample.request
    sampling, stop = SamplingParams(), StopConditions()
    if isinstance(request.sampling, SamplingParams):
        sampling.CopyFrom(request.sampling)
    if isinstance(request.stop, StopConditions):
        stop.CopyFrom(request.stop)
    for field in ("logprobs", "prompt_logprobs", "prompt_logprobs_start", "predicted_token_ids"):
        sampling.ClearField(field)
    num_left = max_tokens - len(request.prompt_token_ids)
    wanted = num_left if request.max_tokens is None else min(request.max_tokens, num_left)
    stop.min_tokens = min(stop.min_tokens, wanted)
    return _shadow_request(
        sample,
        candidate,
        number,
        slot,
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=wanted,
        sampling=sampling,
        stop=stop,
    )


def _shadow_request(
    sample: Sample,
    candidate: str,
    number: int,
    slot: int,
    *,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams,
    stop: StopConditions | None,
) -> Request:
    request = sample.request
    return Request(
        request_id=f"{SHADOW_CLIENT_ID}-{number}-{request.request_id}",
        client_id=SHADOW_CLIENT_ID,
        model=candidate,
        prompt_token_ids=prompt_token_ids,
        prompt_text="",
        choices=(ChoiceSpec(slot, 0),),
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop,
        timeout_seconds=TIMEOUT_SECONDS,
        # No caller's name and no salt has this character: cached blocks are found only by other shadows of the same
        # caller.
        tenant=f"{SHADOW_TENANT}{request.tenant}",
        cache_salt=f"shadow\0{request.cache_salt}",
        tier=TierRank.SHADOW,
        max_cached_tokens=max_cached_tokens(sampling),
    )
