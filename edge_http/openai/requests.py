"""Decodes the bodies that clients post into typed and validated structs. Errors name the field. What becomes of other
fields than these is the rule of edge_http/formatting/body_fields.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from edge_http.formatting.body_fields import LENIENT, NO_HEADERS, BodyReader, FieldRules
from edge_http.formatting.decoding import check_num_messages
from edge_http.openai import unsupported
from kvloom.conversation.earlier import MEDIA
from kvloom.errors import KvloomError, invalid_argument
from kvloom.errors import unsupported as unsupported_error
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.models.model_routes import MAX_CANDIDATES
from kvloom_common.text.prompt_images import NO_MARKS, ImageMarks

FallbackModels = Annotated[list[str], msgspec.Meta(max_length=MAX_CANDIDATES)] | None
"""OpenRouter's extension: the models that take the request, in this order, if `model` cannot."""


class Body(msgspec.Struct, forbid_unknown_fields=True):
    pass


TEXT_PARTS: Final = frozenset(("text", "input_text", "output_text", "summary_text", "reasoning_text"))
"""The types of parts that have a text, in chat completions and in the Responses API."""


class OpenStruct(msgspec.Struct):
    """A part of messages or of tools. Other software adds fields of its own to these, which are left out."""


class ContentPart(OpenStruct, kw_only=True):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    """With type refusal: what the assistant said instead of an answer."""
    file: dict[str, Any] | None = None
    """With type file: `file_id`, or `file_data` and `filename`. Its text is what the model reads."""
    image_url: str | dict[str, Any] | None = None
    """With type image_url: `url`, a data: URL or an https: one."""


class FunctionBody(OpenStruct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """A JSON Schema of type object."""
    strict: bool | None = None


class ToolBody(OpenStruct, kw_only=True):
    type: str
    function: FunctionBody | None = None
    custom: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class NamedFunction(OpenStruct, kw_only=True):
    name: str


class AllowedTool(OpenStruct, kw_only=True):
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


class CalledFunction(OpenStruct, kw_only=True):
    name: str | None = None
    arguments: str | dict[str, Any] | list[Any] | None = None
    """A JSON object as text. Anything else is mapped to one."""


class CustomCall(OpenStruct, kw_only=True):
    name: str | None = None
    input: str | None = None


class ToolCallBody(OpenStruct, kw_only=True):
    """A call in an assistant's message."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None
    custom: CustomCall | None = None
    """A call of a tool that takes text; it is shown to the model as one with the argument `input`."""


class Message(OpenStruct, kw_only=True):
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
    reasoning: str | list[Any] | dict[str, Any] | None = None
    """The same, as vLLM and OpenRouter name it; only a text is used."""
    refusal: str | None = None


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's extension: with include_usage, every chunk has the usage so far."""


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


ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
"""Those of the official clients."""
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class GenerationBody(Body, kw_only=True):
    """The fields that chat and plain completions share."""

    model: str
    models: FallbackModels = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """An extension. 0 or -1 means all tokens, which is the default."""
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
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    """vLLM's extension: the likeliest tokens to report for each token of the prompt."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """An extension."""
    guided_json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """The predecessors of `structured_outputs`, of which one may be given: a JSON Schema."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    skip_special_tokens: bool | None = None
    """vLLM's extension. The default is true; with false, the text of the answer has the names of special tokens."""
    truncate_prompt_tokens: int | None = None
    """vLLM's extension: only the last tokens of the prompt are used, at most so many; -1: as many as the window has."""
    safety_identifier: str | None = None
    """The caller's user, for the statistics of the safety policy."""
    guardrails: list[str] | None = None
    """An extension, as LiteLLM names it: rules of the safety policy that hold besides those that hold anyway."""
    spaces_between_special_tokens: bool | None = None
    """Without effect, like the next ones: there are no spaces to leave out, and no beams whose length could count."""
    length_penalty: float | None = None
    early_stopping: Any = None
    guided_decoding_backend: str | None = None
    user: str | int | None = None
    """Without effect, like the next ones: their purposes are abuse monitoring, caching, storage and billing."""
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    """Requests with the same key belong together, e.g. to one conversation. It is a hint for placement."""
    service_tier: ServiceTier | None = None
    """"flex" requests may wait, and are the first to be rejected under overload. The others are alike."""
    priority: int | None = None
    """vLLM's extension: values above 0 are less urgent, like service_tier "flex"."""


class ModerationMode(Body, kw_only=True):
    """Says what becomes of a text that is flagged."""

    mode: Literal["score", "block"]


class ModerationPolicy(Body, kw_only=True):
    """Says what becomes of a request and of its answer."""

    input: ModerationMode | None = None
    output: ModerationMode | None = None


class InlineModeration(Body, kw_only=True):
    """The safety policy judges the request's texts and its answer, and the results come with the answer."""

    model: str
    """This is without effect: the safety policy decides."""
    policy: ModerationPolicy | None = None
    """A side that it does not name is scored."""


class ReasoningBody(OpenStruct, kw_only=True):
    """OpenRouter's way to say what `reasoning_effort` says."""

    effort: ReasoningEffort | None = None
    enabled: bool | None = None


class ThinkingBody(OpenStruct, kw_only=True):
    """Another way of several services: {"type": "enabled"} or {"type": "disabled"}."""

    type: str | None = None


class ChatBody(GenerationBody, kw_only=True):
    messages: list[Message]
    tools: list[ToolBody] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionBody] | None = None
    """The predecessor of `tools`."""
    function_call: str | NamedFunction | None = None
    reasoning_effort: ReasoningEffort | None = None
    """For models whose chat template has such a setting; "none" switches thinking off."""
    reasoning: ReasoningBody | None = None
    thinking: ThinkingBody | None = None
    enable_thinking: bool | None = None
    """A variable of the chat template, as some services name it in the body."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Without effect: a hint for OpenAI's models."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's extension: further variables of the chat template, e.g. {"enable_thinking": false}."""
    add_generation_prompt: bool | None = None
    """vLLM's extension: whether the prompt ends with the beginning of an answer, which is the default. It can be false
    only with the next one."""
    continue_final_message: bool | None = None
    """vLLM's extension: whether the last message is the beginning of the answer."""
    max_completion_tokens: int | None = None
    prediction: Prediction | None = None
    moderation: InlineModeration | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    """If true, the answer begins with the prompt."""
    add_special_tokens: bool | None = None
    """vLLM's extension: whether texts get the tokens that the tokenizer adds, which is the default."""


class ModerationPart(Body, kw_only=True):
    type: str
    text: str | None = None
    image_url: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class ModerationBody(Body, kw_only=True):
    input: str | list[str | ModerationPart]
    model: str | None = None
    """Ignored: the safety policy decides."""


def decode_moderation(
    raw: bytes, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS
) -> ModerationBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    return _MODERATION.read(raw, rules, headers)


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


def decode_chat(
    raw: bytes, max_messages: int, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS
) -> ChatBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    body = _CHAT.read(raw, rules, headers)
    _check_shared(body)
    check_num_messages(len(body.messages), max_messages)
    return body


def decode_completion(
    raw: bytes, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS
) -> CompletionBody:
    """Decode a body. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    body = _COMPLETION.read(raw, rules, headers)
    _check_shared(body)
    return body


def message_text(message: Message, number: int, marks: ImageMarks = NO_MARKS) -> str:
    """Return the text of the message with that index in the body, with the marks of images. Its parts are joined in
    order."""
    content = message.content
    if isinstance(content, str):
        return content
    field = f"messages[{number}].content"
    if content is None:
        raise invalid_argument(f"{field} is missing.", field)
    return parts_text(content, field, marks)


def parts_text(parts: Sequence[ContentPart], field: str, marks: ImageMarks = NO_MARKS) -> str:
    """Return the text of the parts, joined in order."""
    return "".join(marks.get(id(part)) or _part_text(part, f"{field}[{i}]") for i, part in enumerate(parts))


def _part_text(part: ContentPart, at: str) -> str:
    if part.type not in TEXT_PARTS:
        raise refused_part(part.type, at)
    if part.text is None:
        raise invalid_argument(f"{at}.text is missing.", f"{at}.text")
    return part.text


def refused_part(kind: str, at: str) -> KvloomError:
    """The error for a part that no model here can take."""
    why = {
        "image": " by this model: it has no capability 'vision'",
        "file": " without an orchestrator, which reads them (kvloom up --orchestrator)",
    }.get(MEDIA.get(kind, ""), "")
    field = f"{at}.type"
    return unsupported_error(f"{field}: content parts of type {_quoted(kind)} are not supported{why}.", field)


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


_CHAT: Final = BodyReader(ChatBody, unsupported.CHAT)
_COMPLETION: Final = BodyReader(CompletionBody, unsupported.COMPLETION)
_MODERATION: Final = BodyReader(ModerationBody)
