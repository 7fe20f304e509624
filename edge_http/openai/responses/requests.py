"""The body of POST /v1/responses. Errors name the field; what needs state on the server is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from edge_http.formatting.body_fields import LENIENT, NO_HEADERS, BodyReader, FieldRules, Refused
from edge_http.openai.requests import Body, OpenStruct, ReasoningEffort, ServiceTier, StreamOptions
from kvloom.errors import invalid_argument
from kvloom.errors import unsupported as unsupported_error
from kvloom_common.models.model_routes import MAX_CANDIDATES

LOGPROBS: Final = "message.output_text.logprobs"
"""The one part of an answer that can be included. Others, such as "reasoning.encrypted_content", are of items that no
response has, so they are without effect."""
_NO_STATE: Final = Refused(why=": responses are not stored. Send store: false, and the whole conversation as input")
"""Says why, where a client may not expect it: OpenAI stores responses unless it is told not to."""
_REFUSED: Final = {
    "access_programs": Refused(),
    "background": _NO_STATE,
    "context_management": Refused(),
    "conversation": _NO_STATE,
    "image": Refused(),
    "moderation": Refused(),
    "previous_response_id": _NO_STATE,
    "prompt": Refused(),
}


class TextFormat(Body, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None
    """Without effect: every answer conforms to its schema."""


class TextOptions(Body, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Without effect: a hint for OpenAI's models."""


class ReasoningOptions(Body, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: str | None = None
    """Without effect: there are no summaries."""
    generate_summary: str | None = None
    """The predecessor of `summary`."""
    context: str | None = None
    mode: str | None = None


class ResponsesAllowedTool(OpenStruct, kw_only=True):
    type: str
    name: str | None = None
    namespace: str | None = None
    server_label: Any = None


class ResponsesToolChoice(Body, kw_only=True):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ResponsesAllowedTool] | None = None
    server_label: Any = None


class ResponsesBody(Body, kw_only=True):
    model: str
    models: Annotated[list[str], msgspec.Meta(max_length=MAX_CANDIDATES)] | None = None
    """The models that take the request, in this order, as in chat completions."""
    input: str | list[msgspec.Raw]
    """A user's message, or items (input_items.py)."""
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    """Without effect: it limits the calls of tools that a server runs."""
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["disabled", "auto"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None
    service_tier: ServiceTier | None = None
    """"flex" requests may wait, and are the first to be rejected under overload. The others are alike."""
    user: str | int | None = None
    """Without effect, like the next ones."""
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_key: str | None = None
    """Requests with the same key belong together, e.g. to one conversation. It is a hint for placement."""
    prompt_cache_options: Any = None
    client_metadata: Any = None
    store: bool | None = None
    """It can only be false: responses are not stored."""

    @property
    def wants_logprobs(self) -> bool:
        return self.include is not None and LOGPROBS in self.include


_READER: Final = BodyReader(ResponsesBody, _REFUSED)


def decode_responses(
    raw: bytes, max_items: int, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS
) -> ResponsesBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    body = _READER.read(raw, rules, headers)
    if body.store:
        raise _NO_STATE.error("store")
    if not body.input:
        raise invalid_argument("input must not be empty.", "input")
    if not isinstance(body.input, str) and len(body.input) > max_items:
        raise invalid_argument(f"input has {len(body.input)} items; at most {max_items}.", "input")
    for number, name in enumerate(body.include or ()):
        if "." not in name:
            raise invalid_argument(f"include[{number}]: there is no {name[:64]!r} to include.", f"include[{number}]")
    if body.top_logprobs and not body.wants_logprobs:
        raise invalid_argument(f"top_logprobs goes only with include: [{LOGPROBS!r}].", "top_logprobs")
    _check_options(body)
    return body


def _check_options(body: ResponsesBody) -> None:
    if body.stream_options is not None:
        if not body.stream:
            raise invalid_argument("stream_options goes only with stream: true.", "stream_options")
        if body.stream_options.include_obfuscation:
            raise _not_supported("stream_options.include_obfuscation")
    if body.truncation == "auto":
        raise unsupported_error("truncation: 'auto' is not supported. Leave items out of input instead.", "truncation")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise invalid_argument("max_tool_calls must be at least 1.", "max_tool_calls")
    reasoning = body.reasoning
    if reasoning is None:
        return
    for name, off in (("context", "auto"), ("mode", "standard")):
        if getattr(reasoning, name) not in (None, off):
            raise _not_supported(f"reasoning.{name}")


def _not_supported(field: str) -> Exception:
    return unsupported_error(f"{field} is not supported.", field)
