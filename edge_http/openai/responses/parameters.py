"""Converts a body's parameters to the fabric's terms, and to what the response repeats of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from edge_http.formatting.body_guide import BodyGuide
from edge_http.formatting.json_bytes import Json, encode_json
from edge_http.openai.requests import ChatBody
from edge_http.openai.responses.requests import ResponsesBody, ResponsesToolChoice, TextFormat
from edge_http.openai.responses.tools import ResponseTools
from kvloom.conversation.tools import Tool
from kvloom.errors import invalid_argument
from kvloom.guide import check_guide
from kvloom.sampling import DEFAULT_TEMPERATURE, DEFAULT_TOP_P
from kvloom.v1.generation_pb2 import Guide, SamplingParams

_MAX_UINT32: Final = 2**32 - 1
_ABSENT: Final = (b"", b"null")


def as_chat(body: ResponsesBody) -> ChatBody:
    """The parameters that both APIs have, which are checked and converted alike."""
    return ChatBody(
        model=body.model,
        messages=[],
        temperature=body.temperature,
        top_p=body.top_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logprobs=body.wants_logprobs,
        top_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
        metadata=body.metadata,
        service_tier=body.service_tier,
    )


def max_tokens_of(body: ResponsesBody) -> int | None:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    limit = body.max_output_tokens
    if limit is not None and not 1 <= limit <= _MAX_UINT32:
        message = "max_output_tokens must be at least 1 and fit the model's window."
        raise invalid_argument(message, "max_output_tokens")
    return limit


def template_options(body: ResponsesBody) -> Mapping[str, Any]:
    """The variables that the request gives to the chat template."""
    effort = None if body.reasoning is None else body.reasoning.effort
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def text_guide(body: ResponsesBody) -> BodyGuide | None:
    """Return the guide for the form of the text that the body requests, or None. Raises KvloomError
    (INVALID_ARGUMENT)."""
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return BodyGuide(Guide(json_object=True), "text.format")
    field = "text.format.schema"
    if bytes(form.schema) in _ABSENT:
        raise invalid_argument(f"{field} is missing.", field)
    try:
        guide = Guide(json_schema=bytes(form.schema).decode())
    except UnicodeDecodeError as error:  # parts that are not decoded with the body are not checked with it either
        raise invalid_argument(f"{field} is not valid UTF-8.", field) from error
    check_guide(guide, field)
    return BodyGuide(guide, field)


def echo_of(
    body: ResponsesBody, given: ResponseTools, defaults: SamplingParams | None = None, state: Json | None = None
) -> bytes:
    """The JSON object of what the response repeats of the request. `defaults` are the model's. `state`: what it says
    of stored objects; None: there are none."""
    defaults = defaults or SamplingParams()
    reasoning = body.reasoning
    fields: Json = {
        "background": False,
        "conversation": None,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": body.presence_penalty or 0.0,
        "previous_response_id": None,
        "prompt": None,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "flex" if body.service_tier == "flex" else "default",
        "store": False,
        "temperature": _effective(body.temperature, defaults, "temperature", DEFAULT_TEMPERATURE),
        "text": _text(body),
        "tool_choice": _tool_choice(body.tool_choice),
        "tools": [_tool(tool) for tool in given.all_tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _effective(body.top_p, defaults, "top_p", DEFAULT_TOP_P),
        "truncation": body.truncation or "disabled",
        "user": body.user,
        **(state or {}),
    }
    return encode_json(fields)


def _effective(given: float | None, defaults: SamplingParams, name: str, otherwise: float) -> float:
    if given is not None:
        return given
    return getattr(defaults, name) if defaults.HasField(name) else otherwise


def _text(body: ResponsesBody) -> Json:
    form = None if body.text is None else body.text.format
    return {"format": _format(form), "verbosity": "medium"}


def _format(form: TextFormat | None) -> Json:
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    return {
        "type": form.type,
        "name": form.name or "",
        "description": form.description,
        "schema": msgspec.Raw(bytes(form.schema)),
        "strict": True,
    }


def _tool_choice(choice: str | ResponsesToolChoice | None) -> Any:
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if choice.type in ("function", "custom"):
        return {"type": choice.type, "name": choice.name}
    tools = [{"type": tool.type, "name": tool.name} for tool in choice.tools or ()]
    return {"type": choice.type, "mode": choice.mode, "tools": tools}


def _tool(tool: Tool | msgspec.Raw) -> Any:
    if isinstance(tool, msgspec.Raw):
        return tool
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description or None,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
