"""The body of POST /v1/responses. Errors name the field; what needs state on the server is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from edge_http.formatting.decoding import decode_body
from edge_http.openai import unsupported
from edge_http.openai.requests import Body, StreamOptions
from edge_http.openai.unsupported import Harmless
from kvloom.errors import invalid_argument
from kvloom.errors import unsupported as unsupported_error
from kvloom_common.models.model_routes import MAX_CANDIDATES

LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDABLE: Final = frozenset(
    (
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    )
)
"""All but the first ask for parts of items that no response has, so they are without effect."""
_NOT_SUPPORTED: Final[Harmless] = {
    "access_programs": (),
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_options": ({},),
    "store": (False,),
}
"""Maps each field that is refused to the values, besides null, that request nothing."""
_STORED: Final = frozenset(("background", "conversation", "previous_response_id", "store"))


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


class ReasoningOptions(Body, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None
    """The predecessor of `summary`."""
    context: str | None = None
    mode: str | None = None


class AllowedTool(Body, kw_only=True):
    type: str
    name: str | None = None
    namespace: str | None = None
    server_label: Any = None


class ToolChoiceBody(Body, kw_only=True):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None
    server_label: Any = None


class ResponsesBody(Body, kw_only=True):
    model: str
    models: Annotated[list[str], msgspec.Meta(max_length=MAX_CANDIDATES)] | None = None
    """As in chat completions."""
    input: str | list[msgspec.Raw]
    """A user's message, or items (input_items.py)."""
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    """Without effect: it limits the calls of tools that a server runs."""
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    """Of the Open Responses specification, as is the next one."""
    frequency_penalty: float | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: Literal["disabled", "auto"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """"flex" requests may wait, and are the first to be rejected under overload. The others are alike."""
    user: str | None = None
    """Without effect, like the next two."""
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_key: str | None = None
    """Requests with the same key belong together, e.g. to one conversation. It is a hint for placement."""
    access_programs: Any = None
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    store: Any = None

    @property
    def wants_logprobs(self) -> bool:
        return self.include is not None and LOGPROBS in self.include


_DECODER: Final = msgspec.json.Decoder(ResponsesBody)


def decode_responses(raw: bytes, max_items: int) -> ResponsesBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    body = decode_body(_DECODER, raw)
    _refuse_state(body)
    unsupported.refuse(body, _NOT_SUPPORTED)
    if not body.input:
        raise invalid_argument("input must not be empty.", "input")
    if not isinstance(body.input, str) and len(body.input) > max_items:
        raise invalid_argument(f"input has {len(body.input)} items; at most {max_items}.", "input")
    for number, name in enumerate(body.include or ()):
        if name not in _INCLUDABLE:
            raise invalid_argument(f"include[{number}]: there is no {name[:64]!r} to include.", f"include[{number}]")
    if body.top_logprobs and not body.wants_logprobs:
        raise invalid_argument(f"top_logprobs goes only with include: [{LOGPROBS!r}].", "top_logprobs")
    _check_options(body)
    return body


def _refuse_state(body: ResponsesBody) -> None:
    """Say why, where a client may not expect it: OpenAI stores responses unless it is told not to."""
    for name in _STORED:
        value = getattr(body, name)
        if value is not None and value is not False:
            raise unsupported_error(
                f"{name} is not supported: responses are not stored. Send store: false, and the whole conversation "
                "as input.",
                name,
            )


def _check_options(body: ResponsesBody) -> None:
    if body.stream_options is not None:
        if not body.stream:
            raise invalid_argument("stream_options goes only with stream: true.", "stream_options")
        if body.stream_options.include_obfuscation:
            raise _not_supported("stream_options.include_obfuscation")
    if body.truncation == "auto":
        raise unsupported_error("truncation: 'auto' is not supported. Leave items out of input instead.", "truncation")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise _not_supported("text.verbosity")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise invalid_argument("max_tool_calls must be at least 1.", "max_tool_calls")
    reasoning = body.reasoning
    if reasoning is None:
        return
    for name, harmless in (
        ("summary", ("auto", "none")),
        ("generate_summary", ("auto", "none")),
        ("context", ("auto",)),
        ("mode", ("standard",)),
    ):
        if getattr(reasoning, name) not in (None, *harmless):
            raise _not_supported(f"reasoning.{name}")


def _not_supported(field: str) -> Exception:
    return unsupported_error(f"{field} is not supported.", field)
