"""The body of POST /v1/responses. Errors name the field; what needs state on the server is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from edge_http.formatting.body_fields import LENIENT, NO_HEADERS, BodyReader, FieldRules, Refused
from edge_http.openai.requests import (
    Body,
    InlineModeration,
    OpenStruct,
    ReasoningEffort,
    ServiceTier,
    StreamOptions,
)
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
    "conversation": _NO_STATE,
    "image": Refused(),
    "previous_response_id": _NO_STATE,
    "prompt": _NO_STATE,
}
_NEED_STATE: Final = ("background", "conversation", "previous_response_id", "prompt")
_STORED_REFUSED: Final = {name: why for name, why in _REFUSED.items() if name not in _NEED_STATE}


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


class CompactionOptions(Body, kw_only=True):
    type: Literal["compaction"]
    """The conversation is compacted: a summary stands for what comes before the last message of the user."""
    compact_threshold: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """From so many tokens of the prompt on; by default three quarters of the model's window."""


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
    """"auto": the earliest turns are left out when the conversation does not fit the model's window."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None
    context_management: Annotated[list[CompactionOptions], msgspec.Meta(max_length=1)] | None = None
    """The treatment of a long conversation."""
    moderation: InlineModeration | None = None
    safety_identifier: str | None = None
    """The caller's user, for the statistics of the safety policy."""
    guardrails: list[str] | None = None
    """An extension, as LiteLLM names it: rules of the safety policy that hold besides those that hold anyway."""
    service_tier: ServiceTier | None = None
    """"flex" requests may wait, and are the first to be rejected under overload. The others are alike."""
    user: str | int | None = None
    """Without effect, like the next ones."""
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


_B = TypeVar("_B", bound=ResponsesBody)


class ConversationName(Body, kw_only=True):
    id: str
    """That of the conversation."""


class BackgroundOptions(Body, kw_only=True):
    completion_window: Literal["soonest", "2h", "8h"] | None = None
    """"2h" and "8h" are of the class `batch`: generated with what others leave, and not streamed."""


class PromptVariable(Body, kw_only=True):
    type: Literal["input_text"]
    text: str
    """The value."""


class PromptName(Body, kw_only=True):
    id: str
    """That of a stored prompt."""
    version: str | None = None
    """A version of it. By default the latest."""
    variables: dict[str, str | PromptVariable] | None = None
    """The values of its variables."""


class StoredResponsesBody(ResponsesBody, kw_only=True):
    """A body where an orchestrator stores responses."""

    input: str | list[msgspec.Raw] = ""
    """A user's message, or items. It may be missing where there is a prompt."""
    prompt: PromptName | None = None
    """A stored template: its messages come before all others. It needs an orchestrator, like the next three."""
    previous_response_id: str | None = None
    """The response that this one follows."""
    at: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | str | None = None
    """An extension: the response forks from the previous one, behind this item of it or of those before it, or behind
    so many tokens of its output, which are then continued. By default it follows behind all of it."""
    conversation: str | ConversationName | None = None
    """The conversation that it belongs to: its items come before the input, and it gets the input and the output."""
    background: bool | None = None
    """True: it is answered at once with a response that is queued, and generated whatever becomes of the client."""
    background_options: BackgroundOptions | None = None
    """When it is generated."""
    store: bool | None = None
    """True, unless it is false: the response can be found again."""

    @property
    def conversation_id(self) -> str:
        given = self.conversation
        return given.id if isinstance(given, ConversationName) else given or ""

    @property
    def has_time(self) -> bool:
        """True when others come first."""
        options = self.background_options
        return options is not None and options.completion_window in ("2h", "8h")

    @property
    def is_stored(self) -> bool:
        return self.store is not False


class CompactBody(Body, kw_only=True):
    """The body of POST /v1/responses/compact."""

    model: str
    models: Annotated[list[str], msgspec.Meta(max_length=MAX_CANDIDATES)] | None = None
    """The models that take the request, in this order, as in chat completions."""
    input: str | list[msgspec.Raw] | None = None
    """The conversation, or what follows on `previous_response_id`."""
    instructions: str | None = None
    """A system message for the model that sums it up."""
    previous_response_id: str | None = None
    """The response with which the conversation ends. It needs an orchestrator."""
    guardrails: list[str] | None = None
    """Rules of the safety policy that hold besides those that hold anyway."""
    service_tier: ServiceTier | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_key: str | None = None
    """Requests with the same key belong together. It is a hint for placement."""
    prompt_cache_options: Any = None


_READER: Final = BodyReader(ResponsesBody, _REFUSED)
_COMPACT_READER: Final = BodyReader(CompactBody, {"image": Refused()})
_STORED_READER: Final = BodyReader(StoredResponsesBody, _STORED_REFUSED)


def decode_responses(
    raw: bytes, max_items: int, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS
) -> ResponsesBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    body = _READER.read(raw, rules, headers)
    if body.store:
        raise _NO_STATE.error("store")
    return _checked(body, max_items)


def decode_stored(
    raw: bytes, max_items: int, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS
) -> StoredResponsesBody:
    """Decodes a body as `decode_responses` does, where an orchestrator stores responses."""
    body = _STORED_READER.read(raw, rules, headers)
    if body.conversation_id and body.previous_response_id:
        raise invalid_argument("Give either conversation or previous_response_id.", "conversation")
    if (body.conversation_id or body.background) and not body.is_stored:
        what = "background" if body.background else "a conversation"
        raise invalid_argument(f"A response of {what} is stored: store cannot be false.", "store")
    if body.at is not None:
        _check_fork(body)
    if body.background_options is not None and not body.background:
        raise invalid_argument("background_options goes only with background: true.", "background_options")
    if body.has_time and body.stream:
        raise invalid_argument("stream goes only with the completion_window soonest.", "stream")
    if body.background and body.context_management and body.prompt is not None:
        raise Refused(why=" with background: true and a prompt").error("context_management")
    return _checked(body, max_items)


def _check_fork(body: StoredResponsesBody) -> None:
    if body.previous_response_id is None:
        raise invalid_argument("at goes only with previous_response_id.", "at")
    if isinstance(body.at, str):
        return
    if body.input:
        raise invalid_argument("With at as a number of tokens, the input is that of the previous response.", "input")
    if body.background or body.context_management or body.wants_logprobs:
        raise invalid_argument(
            "at as a number of tokens does not go with background, context_management or log-probabilities.", "at"
        )


def decode_compact(
    raw: bytes,
    max_items: int,
    rules: FieldRules = LENIENT,
    headers: Mapping[str, str] = NO_HEADERS,
    *,
    has_state: bool,
) -> CompactBody:
    """Decodes a body as `decode_responses` does. `has_state`: there is an orchestrator."""
    body = _COMPACT_READER.read(raw, rules, headers)
    if body.previous_response_id and not has_state:
        raise _NO_STATE.error("previous_response_id")
    if not body.input and not body.previous_response_id:
        raise invalid_argument("input must not be empty.", "input")
    if isinstance(body.input, list) and len(body.input) > max_items:
        raise invalid_argument(f"input has {len(body.input)} items; at most {max_items}.", "input")
    return body


def _checked(body: _B, max_items: int) -> _B:
    if not body.input and getattr(body, "prompt", None) is None and getattr(body, "at", None) is None:
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
