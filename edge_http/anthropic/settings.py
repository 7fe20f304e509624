"""The parameters besides messages and tools: sampling, stop sequences, thinking and structured output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from edge_http.anthropic.requests import MessagesBody, PromptBody
from edge_http.formatting.body_guide import BodyGuide
from edge_http.formatting.decoding import json_text
from kvloom.errors import invalid_argument, unsupported
from kvloom.guide import check_guide
from kvloom.sampling import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, check_sampling, check_stop
from kvloom.v1.generation_pb2 import Guide, SamplingParams, StopConditions

MAX_TEMPERATURE: Final = 1.0
MIN_BUDGET_TOKENS: Final = 1024
_MAX_UINT32: Final = 2**32 - 1
_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Maps `effort` to the `reasoning_effort` of chat templates."""


def sampling_of(body: MessagesBody, guide: Guide | None) -> SamplingParams:
    """Raises KvloomError (INVALID_ARGUMENT) that names the field."""
    if body.temperature is not None and not 0.0 <= body.temperature <= MAX_TEMPERATURE:
        raise invalid_argument(
            f"temperature must be between 0 and {MAX_TEMPERATURE:g}, got {body.temperature:g}.", "temperature"
        )
    if body.top_k is not None and not -1 <= body.top_k <= _MAX_UINT32:
        raise invalid_argument(f"top_k must be between 0 and {_MAX_UINT32}.", "top_k")
    top_k = None if body.top_k is None else max(0, body.top_k)  # many clients say -1 for all tokens
    sampling = SamplingParams(temperature=body.temperature, top_p=body.top_p, top_k=top_k, guide=guide)
    check_sampling(sampling)
    return sampling


def max_tokens_of(body: MessagesBody) -> int:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    if not 1 <= body.max_tokens <= _MAX_UINT32:
        raise invalid_argument("max_tokens must be at least 1.", "max_tokens")
    return body.max_tokens


def stop_conditions(body: MessagesBody, max_tokens: int) -> StopConditions:
    """Raises KvloomError (INVALID_ARGUMENT) that names the field."""
    texts = body.stop_sequences or []
    if len(texts) > MAX_STOP_STRINGS:
        raise invalid_argument(f"stop_sequences has {len(texts)} texts; at most {MAX_STOP_STRINGS}.", "stop_sequences")
    for number, text in enumerate(texts):
        if not 0 < len(text) <= MAX_STOP_STRING_CHARS:
            field = f"stop_sequences[{number}]"
            raise invalid_argument(f"{field} must have 1 to {MAX_STOP_STRING_CHARS} characters.", field)
    stop = StopConditions(max_tokens=max_tokens, stop=texts)
    check_stop(stop)
    return stop


def template_options(body: PromptBody) -> Mapping[str, Any]:
    """The variables that the request gives to the chat template. Raises KvloomError (INVALID_ARGUMENT,
    UNSUPPORTED_PARAMETER)."""
    options: dict[str, Any] = {}
    thinking, config = body.thinking, body.output_config
    if config is not None and config.effort is not None:
        options["reasoning_effort"] = _EFFORTS[config.effort]
    if thinking is None:
        return options
    if thinking.type == "between_tools":
        raise unsupported("thinking.type: 'between_tools' is not supported.", "thinking.type")
    field = "thinking.budget_tokens"
    if thinking.budget_tokens is not None:
        if thinking.type != "enabled":
            raise invalid_argument(f"{field} goes only with type: enabled.", field)
        if thinking.budget_tokens < MIN_BUDGET_TOKENS:
            raise invalid_argument(f"{field} must be at least {MIN_BUDGET_TOKENS}.", field)
        if isinstance(body, MessagesBody) and thinking.budget_tokens >= body.max_tokens:
            raise invalid_argument(f"{field} must be less than max_tokens.", field)
    elif thinking.type == "enabled":
        raise invalid_argument(f"{field} is missing.", field)
    options["enable_thinking"] = thinking.type != "disabled"
    return options


def thinks(body: PromptBody) -> bool:
    """True when the request asks for thinking."""
    return body.thinking is not None and body.thinking.type != "disabled"


def omits_thinking(body: PromptBody) -> bool:
    """True when the client wants to know that the model thinks, and not what."""
    return body.thinking is not None and body.thinking.display == "omitted"


def output_guide(body: PromptBody) -> BodyGuide | None:
    """The guide of a structured output, and the field that asks for it. Raises KvloomError (INVALID_ARGUMENT,
    UNSUPPORTED_PARAMETER)."""
    wanted, field = body.output_format, "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        if wanted is not None:
            raise invalid_argument("Give either output_config.format or output_format.", "output_format")
        wanted, field = body.output_config.format, "output_config.format"
    if wanted is None:
        return None
    field += ".schema"
    guide = Guide(json_schema=json_text(wanted.schema, field))
    check_guide(guide, field)
    return BodyGuide(guide, field)
