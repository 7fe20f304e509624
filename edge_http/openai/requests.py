"""Decodes the bodies that clients post into typed and validated structs. Errors name the field.

Fields that kvloom does not support are declared from the tables in `unsupported.py`: null and "off" values are
accepted, and all others are rejected by name. Unknown fields are rejected by name, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from edge_http.formatting.decoding import check_num_messages, decode_body
from edge_http.openai import unsupported
from edge_http.openai.unsupported import Harmless
from kvloom.errors import KvloomError, invalid_argument
from kvloom.errors import unsupported as unsupported_error
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.models.model_routes import MAX_CANDIDATES

FallbackModels = Annotated[list[str], msgspec.Meta(max_length=MAX_CANDIDATES)] | None
"""OpenRouter's extension: the models that take the request, in this order, if `model` cannot."""


class Body(msgspec.Struct, forbid_unknown_fields=True):
    pass


class ContentPart(Body, kw_only=True):
    type: str
    text: str | None = None


class FunctionBody(Body, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """A JSON Schema of type object."""
    strict: bool | None = None


class ToolBody(Body, kw_only=True):
    type: str
    function: FunctionBody | None = None
    custom: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class NamedFunction(Body, kw_only=True):
    name: str


class AllowedTool(Body, kw_only=True):
    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None


class AllowedTools(Body, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ToolChoiceBody(Body, kw_only=True):
    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class CalledFunction(Body, kw_only=True):
    name: str
    arguments: str


class ToolCallBody(Body, kw_only=True):
    """A call in an assistant's message."""

    id: str
    type: str | None = None
    function: CalledFunction | None = None
    index: int | None = None
    """Clients that put streamed deltas together may leave it in; it is ignored."""


class Message(Body, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    """Accepted as in OpenAI's API, but used only for role "function", because chat templates do not use it."""
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    """The predecessor of `tool_calls`."""
    reasoning_content: str | None = None
    """An extension: what the assistant thought, for templates that show it to the model again."""
    refusal: str | None = None


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Prediction(Body, kw_only=True):
    type: Literal["content"]
    content: str | list[ContentPart]


class JsonSchemaFormat(Body, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None
    """Ignored: every answer conforms to its schema."""


class ResponseFormat(Body, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body, kw_only=True):
    """vLLM's extension for guided decoding. Exactly one form must be given."""

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """A JSON Schema, or a string that contains one."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(Body, kw_only=True):
    """The fields that chat and plain completions share."""

    model: str
    models: FallbackModels = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """An extension. 0 means all tokens."""
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    """An extension."""
    ignore_eos: bool | None = None
    """An extension for benchmarks."""
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """Maps token ids to what is added to their logits."""
    min_p: float | None = None
    """vLLM's extension, as are the next two."""
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    """vLLM's extension: the likeliest tokens to report for each token of the prompt."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """An extension."""
    user: str | None = None
    """Without effect, like the next three: their purposes are OpenAI's abuse monitoring, storage and billing."""
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    """Requests with the same key belong together, e.g. to one conversation. It is a hint for placement."""
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    """"flex" requests may wait, and are the first to be rejected under overload. The others are alike."""
    priority: int | None = None
    """vLLM's extension: values above 0 are less urgent, like service_tier "flex"."""


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message]
    tools: list[ToolBody] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionBody] | None = None
    """The predecessor of `tools`."""
    function_call: str | NamedFunction | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """For models whose chat template has such a setting; "none" switches thinking off."""
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    """vLLM's extension: further variables of the chat template, e.g. {"enable_thinking": false}."""
    max_completion_tokens: int | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class ModerationPart(Body, kw_only=True):
    type: str
    text: str | None = None
    image_url: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class ModerationBody(Body, kw_only=True):
    input: str | list[str | ModerationPart]
    model: str | None = None
    """Ignored: the safety policy decides."""


def decode_moderation(raw: bytes) -> ModerationBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    return decode_body(_MODERATION_DECODER, raw)


def moderation_texts(body: ModerationBody, max_texts: int, max_chars: int) -> list[str]:
    """Return the texts to judge. The parts of one input are judged one by one. Raises KvloomError (INVALID_ARGUMENT,
    UNSUPPORTED_PARAMETER, REQUEST_TOO_LARGE)."""
    given = [body.input] if isinstance(body.input, str) else body.input
    if not given:
        raise invalid_argument("input must hold at least one text.", "input")
    texts: list[str] = []
    for number, item in enumerate(given):
        if isinstance(item, ModerationPart):
            if item.type != "text":
                field = f"input[{number}].type"
                raise unsupported_error(f"{field}: inputs of type {_quoted(item.type)} are not supported.", field)
            if item.text is None:
                raise invalid_argument(f"input[{number}].text is missing.", f"input[{number}].text")
            item = item.text
        texts.append(item)
    if len(texts) > max_texts or sum(map(len, texts)) > max_chars:
        message = f"input has at most {max_texts} texts, with {max_chars} characters in all."
        raise KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, message, field="input")
    return texts


def decode_chat(raw: bytes, max_messages: int) -> ChatBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    body = _plain(_PLAIN_CHAT_DECODER, raw)
    is_plain = body is not None
    if body is None:
        body = decode_body(_CHAT_DECODER, raw)
        unsupported.refuse(body, unsupported.CHAT)
    _check_shared(body)
    check_num_messages(len(body.messages), max_messages)
    if not is_plain:
        for i, message in enumerate(body.messages):
            unsupported.refuse(message, unsupported.MESSAGE, f"messages[{i}].")
    return body


def decode_completion(raw: bytes) -> CompletionBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    body = _plain(_PLAIN_COMPLETION_DECODER, raw)
    if body is None:
        body = decode_body(_COMPLETION_DECODER, raw)
        unsupported.refuse(body, unsupported.COMPLETION)
    _check_shared(body)
    return body


def message_text(message: Message, number: int) -> str:
    """Return the text of the message with that index in the body. Its parts are joined in order."""
    content = message.content
    if isinstance(content, str):
        return content
    field = f"messages[{number}].content"
    if content is None:
        raise invalid_argument(f"{field} is missing.", field)
    return parts_text(content, field)


def parts_text(parts: Sequence[ContentPart], field: str) -> str:
    """Return the text of the parts, joined in order."""
    return "".join(_part_text(part, f"{field}[{i}]") for i, part in enumerate(parts))


def _part_text(part: ContentPart, at: str) -> str:
    if part.type != "text":
        field = f"{at}.type"
        raise unsupported_error(f"{field}: content parts of type {_quoted(part.type)} are not supported.", field)
    unsupported.refuse(part, unsupported.CONTENT_PART, f"{at}.")
    if part.text is None:
        raise invalid_argument(f"{at}.text is missing.", f"{at}.text")
    return part.text


def _check_shared(body: GenerationBody) -> None:
    if body.stream_options is None:
        return
    if not body.stream:
        raise invalid_argument("stream_options goes only with stream: true.", "stream_options")
    if body.stream_options.include_obfuscation:
        field = "stream_options.include_obfuscation"
        raise unsupported_error(f"{field} is not supported.", field)


def _quoted(text: str, max_chars: int = 32) -> str:
    return repr(text if len(text) <= max_chars else text[:max_chars] + "…")


_T = TypeVar("_T")


def _with_refused_fields(base: type[_T], harmless: Harmless, **replaced: Any) -> type[_T]:
    """Return a subclass of `base` with an additional field of any type for every name in `harmless`."""
    fields = [(name, Any, None) for name in harmless]
    fields += [(name, annotation, *default) for name, (annotation, *default) in replaced.items()]
    # The type of defstruct does not show that it returns a subclass.
    return msgspec.defstruct(  # pyright: ignore[reportReturnType]
        base.__name__, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True
    )


_CONTENT_PART = _with_refused_fields(ContentPart, unsupported.CONTENT_PART)
_CONTENT: Final = (str | list[_CONTENT_PART] | None, None)  # pyright: ignore[reportInvalidTypeForm]
_MESSAGE = _with_refused_fields(Message, unsupported.MESSAGE, content=_CONTENT)
_PLAIN_MESSAGE = _with_refused_fields(Message, {}, content=_CONTENT)
_PLAIN_CHAT_DECODER: Final = msgspec.json.Decoder(
    _with_refused_fields(ChatBody, {}, messages=(list[_PLAIN_MESSAGE],))  # pyright: ignore
)
_PLAIN_COMPLETION_DECODER: Final = msgspec.json.Decoder(CompletionBody)
_CHAT_DECODER: Final = msgspec.json.Decoder(
    _with_refused_fields(ChatBody, unsupported.CHAT, messages=(list[_MESSAGE],))  # pyright: ignore
)
_COMPLETION_DECODER: Final = msgspec.json.Decoder(_with_refused_fields(CompletionBody, unsupported.COMPLETION))

_MODERATION_DECODER: Final = msgspec.json.Decoder(ModerationBody)


def _plain(decoder: msgspec.json.Decoder[_T], raw: bytes) -> _T | None:
    """Decode a body without unsupported fields, as nearly all are, so that no field needs to be checked for rejection.
    Returns None for a body with such a field and for an invalid body."""
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
