"""Validates a body's parameters and converts them to the fabric's SamplingParams and StopConditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from edge_http.formatting.body_guide import BodyGuide
from edge_http.openai.requests import ChatBody, CompletionBody, GenerationBody
from kvloom.errors import KvloomError, context_length_exceeded, invalid_argument, unsupported
from kvloom.sampling import MAX_LOGPROBS, MAX_SHOWN_SPECIAL_TOKENS, check_num_choices, check_sampling, check_stop
from kvloom.v1 import router_service_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom_common.text.tokenizer import ModelTokenizer

_MAX_UINT32: Final = 2**32 - 1
_MAX_UINT64: Final = 2**64 - 1
MAX_CHARS_PER_TOKEN: Final = 16
"""A limit for the average over a whole prompt. Ordinary text has 3 to 5."""
DEFAULT_COMPLETION_MAX_TOKENS: Final = 16
"""OpenAI's default for plain completions."""


def num_choices(body: GenerationBody) -> int:
    n = 1 if body.n is None else body.n
    check_num_choices(n)
    return n


def chat_sampling(body: ChatBody, guide: BodyGuide | None = None) -> SamplingParams:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    logprobs = None
    if body.logprobs:
        logprobs = _whole_number(body.top_logprobs or 0, "top_logprobs", MAX_LOGPROBS)
    elif body.top_logprobs:
        raise invalid_argument("top_logprobs goes only with logprobs: true.", "top_logprobs")
    return _sampling(body, logprobs, guide)


def completion_sampling(body: CompletionBody, guide: BodyGuide | None = None) -> SamplingParams:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    logprobs = None if body.logprobs is None else _whole_number(body.logprobs, "logprobs", MAX_LOGPROBS)
    return _sampling(body, logprobs, guide)


def chat_max_tokens(body: ChatBody) -> tuple[int | None, str]:
    """Return (limit, the field that set it). Both fields may be given if they agree."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid_argument(
            f"max_tokens ({old}) and max_completion_tokens ({new}) contradict each other.", "max_tokens"
        )
    field = "max_tokens" if new is None else "max_completion_tokens"
    limit = old if new is None else new
    return _max_tokens(limit, field), field


def completion_max_tokens(body: CompletionBody) -> int:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    if body.max_tokens == 0 and (body.echo or body.prompt_logprobs is not None):
        return 1  # of which the answer has nothing: the prompt is to be scored
    limit = _max_tokens(body.max_tokens, "max_tokens")
    return DEFAULT_COMPLETION_MAX_TOKENS if limit is None else limit


def tier_of(body: GenerationBody) -> router_service_pb2.Tier:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    priority = body.priority or 0
    if priority < 0:
        raise invalid_argument("priority must not be negative: nothing is more urgent than the default.", "priority")
    if priority > _MAX_UINT32:
        raise invalid_argument(f"priority must be at most {_MAX_UINT32}.", "priority")
    is_batch = priority > 0 or body.service_tier == "flex"
    return router_service_pb2.TIER_BATCH if is_batch else router_service_pb2.TIER_INTERACTIVE


def stop_conditions(body: GenerationBody, max_tokens: int | None) -> StopConditions:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    texts = [body.stop] if isinstance(body.stop, str) else body.stop or []
    for i, token_id in enumerate(body.stop_token_ids or ()):
        _whole_number(token_id, f"stop_token_ids[{i}]", _MAX_UINT32)
    stop = StopConditions(
        max_tokens=max_tokens,
        stop=texts,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        min_tokens=_whole_number(body.min_tokens, "min_tokens", _MAX_UINT32) if body.min_tokens else 0,
    )
    check_stop(stop)
    return stop


def check_window(
    num_prompt_tokens: int,
    max_tokens: int | None,
    max_model_len: int,
    prompt_field: str,
    max_tokens_field: str = "max_tokens",
) -> None:
    """Raise CONTEXT_LENGTH_EXCEEDED if prompt and answer do not fit the model's window."""
    asked = 1 if max_tokens is None else max_tokens
    if num_prompt_tokens + asked > max_model_len:
        raise context_length_exceeded(max_model_len, num_prompt_tokens, max_tokens, prompt_field, max_tokens_field)


def check_text_size(num_chars: int, max_model_len: int, field: str) -> None:
    """Raise CONTEXT_LENGTH_EXCEEDED for a text that cannot fit the window (0 if not known), because tokenizing it would
    take a hundred times its memory."""
    limit = max_model_len * MAX_CHARS_PER_TOKEN
    if limit and num_chars > limit:
        raise KvloomError(
            ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED,
            f"This model's maximum context length is {max_model_len} tokens. However, you requested a prompt of "
            f"{num_chars} characters: the prompt is too long. Please reduce the length of the prompt.",
            field=field,
        )


def _sampling(body: GenerationBody, logprobs: int | None, guide: BodyGuide | None) -> SamplingParams:
    sampling = SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else top_k(body.top_k),
        seed=None if body.seed is None else _seed(body.seed),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias) if body.logit_bias else None,
        logprobs=logprobs,
        guide=None if guide is None else guide.guide,
    )
    check_sampling(sampling)
    return sampling


def show_special_tokens(sampling: SamplingParams, tokenizer: ModelTokenizer) -> None:
    """Have the names of special tokens appear in the text. Raises KvloomError (UNSUPPORTED_PARAMETER) for a model that
    has more than can be shown."""
    token_ids = set(tokenizer.special_token_ids(tokenizer.special_tokens)) - tokenizer.eos_token_ids
    if len(token_ids) > MAX_SHOWN_SPECIAL_TOKENS:
        message = f"skip_special_tokens: this model has more than {MAX_SHOWN_SPECIAL_TOKENS} special tokens to show."
        raise unsupported(message, "skip_special_tokens")
    sampling.shown_special_token_ids.extend(sorted(token_ids))


def top_k(given: int) -> int:
    """vLLM and SGLang say -1 for all tokens. Raises KvloomError (INVALID_ARGUMENT)."""
    return 0 if given == -1 else _whole_number(given, "top_k", _MAX_UINT32)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for name, bias in given.items():
        if not (name.isascii() and name.isdigit() and int(name[:11]) <= _MAX_UINT32):
            raise invalid_argument(f"logit_bias: {name[:16]!r} is not a token id.", "logit_bias")
        biases[int(name)] = bias
    return biases


def _seed(seed: int) -> int:
    """OpenAI's seeds are signed 64-bit numbers. The fabric's are the same bits, unsigned."""
    if not -(2**63) <= seed <= _MAX_UINT64:
        raise invalid_argument("seed must be a 64-bit integer.", "seed")
    return seed & _MAX_UINT64


def _max_tokens(limit: int | None, field: str) -> int | None:
    if limit is None:
        return None
    if not 1 <= limit <= _MAX_UINT32:
        raise invalid_argument(f"{field} must be at least 1 and fit the model's window.", field)
    return limit


def _whole_number(value: int, field: str, most: int) -> int:
    if not 0 <= value <= most:
        raise invalid_argument(f"{field} must be between 0 and {most}.", field)
    return value
