"""Limits and checks for sampling parameters and stop conditions, shared by the edge, the router and the SDK.

The checks raise KvloomError (INVALID_ARGUMENT) and name the field, prefixed with `at` ("" for OpenAI bodies,
"sampling." or "stop." for gRPC messages).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sized
from typing import Any, Final

from kvloom.errors import invalid_argument
from kvloom.guide import check_guide
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions

MAX_CHOICES: Final = 16
MAX_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 64
MAX_REASONING_MARKERS: Final = 8
MAX_LOGIT_BIASES: Final = 1024
MAX_LOGIT_BIAS: Final = 100.0
MAX_PREDICTED_TOKENS: Final = 65_536
MAX_SHOWN_SPECIAL_TOKENS: Final = 256
MAX_PROMPT_LOGPROBS: Final = 131_072
"""The limit for all prompt log-probabilities of a request together: with 20 of the likeliest, they take 1 MB."""
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 100.0
DEFAULT_TEMPERATURE: Final = 1.0
DEFAULT_TOP_P: Final = 1.0


def draw_seed() -> int:
    """A random seed for a request that has none."""
    return secrets.randbits(64)


def is_greedy(sampling: SamplingParams) -> bool:
    """True when the likeliest token is always taken, so that no random number matters."""
    return sampling.HasField("temperature") and sampling.temperature == 0


def with_chosen_logprobs(sampling: SamplingParams) -> SamplingParams:
    """A copy that also asks for the log-probabilities of the chosen tokens, and of no others."""
    copy = SamplingParams()
    copy.CopyFrom(sampling)
    copy.logprobs = 0
    return copy


def check_sampling(sampling: SamplingParams, at: str = "") -> None:
    """Raise KvloomError for a value outside its range."""
    for descriptor, value in sampling.ListFields():  # one call, where most requests set two of many fields
        check = _CHECKS.get(descriptor.name)
        if check is not None:
            check(value, at + descriptor.name)


def check_prompt_logprobs(
    sampling: SamplingParams, num_prompt_tokens: int, num_choices: int, field: str = "sampling.prompt_logprobs"
) -> None:
    """Raise KvloomError if the log-probabilities of the prompt that were asked for are too many, or start behind it."""
    if not sampling.HasField("prompt_logprobs"):
        return
    start = sampling.prompt_logprobs_start
    if start and start >= num_prompt_tokens:
        raise invalid_argument(
            f"{field}_start must be less than the number of prompt tokens, {num_prompt_tokens}, got {start}.",
            f"{field}_start",
        )
    count = (num_prompt_tokens - start) * (1 + sampling.prompt_logprobs) * num_choices
    if count > MAX_PROMPT_LOGPROBS:
        raise invalid_argument(
            f"{field} asks for {count} log-probabilities of the prompt; at most {MAX_PROMPT_LOGPROBS}.", field
        )


def max_cached_tokens(sampling: SamplingParams) -> int | None:
    """How many prompt tokens' KV may come from a cache, because no log-probability of the prompt depends on their
    logits. None: all."""
    if not sampling.HasField("prompt_logprobs"):
        return None
    return max(sampling.prompt_logprobs_start, 1) - 1


def check_stop(stop: StopConditions, at: str = "") -> None:
    """Raise KvloomError for too many or unusable stop conditions."""
    if stop.HasField("max_tokens") and stop.max_tokens < 1:
        raise invalid_argument(f"{at}max_tokens must be at least 1.", f"{at}max_tokens")
    if len(stop.stop) > MAX_STOP_STRINGS:
        raise invalid_argument(f"{at}stop has {len(stop.stop)} strings; at most {MAX_STOP_STRINGS}.", f"{at}stop")
    for i, text in enumerate(stop.stop):
        if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
            field = f"{at}stop[{i}]"
            raise invalid_argument(f"{field} must have 1 to {MAX_STOP_STRING_CHARS} characters.", field)
    if stop.HasField("reasoning"):
        for name in ("openings", "closings"):
            texts = getattr(stop.reasoning, name)
            if len(texts) > MAX_REASONING_MARKERS or not all(0 < len(text) <= MAX_STOP_STRING_CHARS for text in texts):
                field = f"{at}reasoning.{name}"
                most = f"{MAX_REASONING_MARKERS} texts of 1 to {MAX_STOP_STRING_CHARS} characters"
                raise invalid_argument(f"{field} has at most {most}.", field)
    if len(stop.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        field = f"{at}stop_token_ids"
        raise invalid_argument(f"{field} has {len(stop.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}.", field)
    if stop.min_tokens and stop.HasField("max_tokens") and stop.min_tokens > stop.max_tokens:
        field = f"{at}min_tokens"
        raise invalid_argument(f"{field} is {stop.min_tokens}, more than max_tokens, {stop.max_tokens}.", field)


def check_num_choices(n: int, field: str = "n") -> None:
    if not 1 <= n <= MAX_CHOICES:
        raise invalid_argument(f"{field} must be between 1 and {MAX_CHOICES}, got {n}.", field)


def _check_logit_bias(biases: Mapping[int, float], field: str) -> None:
    _check_length(biases, MAX_LOGIT_BIASES, field)
    for token_id, bias in biases.items():
        _check_range(bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, f"{field}.{token_id}")


def _check_length(values: Sized, most: int, field: str) -> None:
    if len(values) > most:
        raise invalid_argument(f"{field} has {len(values)} entries; at most {most}.", field)


def _check_range(value: float, low: float, high: float, field: str) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise invalid_argument(f"{field} must be between {low:g} and {high:g}, got {value:g}.", field)


def _check_num_logprobs(value: int, field: str) -> None:
    if value > MAX_LOGPROBS:
        raise invalid_argument(f"{field} must be at most {MAX_LOGPROBS}, got {value}.", field)


_CHECKS: Final[Mapping[str, Callable[[Any, str], None]]] = {
    "temperature": lambda value, field: _check_range(value, 0.0, 2.0, field),
    "top_p": lambda value, field: _check_range(value, 0.0, 1.0, field),
    "presence_penalty": lambda value, field: _check_range(value, -2.0, 2.0, field),
    "frequency_penalty": lambda value, field: _check_range(value, -2.0, 2.0, field),
    "logprobs": _check_num_logprobs,
    "guide": check_guide,
    "min_p": lambda value, field: _check_range(value, 0.0, 1.0, field),
    "repetition_penalty": lambda value, field: _check_range(
        value, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, field
    ),
    "logit_bias": _check_logit_bias,
    "prompt_logprobs": _check_num_logprobs,
    "predicted_token_ids": lambda value, field: _check_length(value, MAX_PREDICTED_TOKENS, field),
    "shown_special_token_ids": lambda value, field: _check_length(value, MAX_SHOWN_SPECIAL_TOKENS, field),
}
"""By the name of the field; the others may have any value."""
