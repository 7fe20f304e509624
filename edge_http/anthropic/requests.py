"""Decodes the bodies that clients post into typed and validated structs. Errors name the field.

Parameters of Anthropic's API that kvloom does not support are declared with their harmless values, which are accepted;
all others are refused by name, and so are unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from edge_http.anthropic.blocks import ContentBlock, ResultBlock, TextBlock
from edge_http.formatting.body_fields import LENIENT, NO_HEADERS, BodyReader, FieldRules, Refused
from edge_http.formatting.decoding import check_num_messages
from kvloom.conversation.earlier import asked_message
from kvloom.errors import invalid_argument, unsupported
from kvloom_common.models.model_routes import MAX_CANDIDATES

MAX_USER_ID_CHARS: Final = 512
KNOWN_VERSIONS: Final = ("2023-06-01", "2026-10-21")
"""The versions of Anthropic's API whose Messages have this format. The later one has no sampling parameters; kvloom's
models do, so they are accepted with either."""


class BodyPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a body. What becomes of other fields is the rule of edge_http/formatting/body_fields.py."""


class MessagesTurn(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class Metadata(BodyPart, kw_only=True):
    user_id: str | None = None
    """Accepted, and not used: callers are told apart by their credentials."""


class Thinking(BodyPart, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    """Checked, and not enforced: max_tokens bounds thinking and answer together."""
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(BodyPart, kw_only=True):
    type: Literal["json_schema"]
    schema: msgspec.Raw


class OutputConfig(BodyPart, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesToolChoice(BodyPart, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ContextEdit(msgspec.Struct, kw_only=True):
    type: str


class ContextManagement(msgspec.Struct, kw_only=True):
    edits: list[ContextEdit] | None = None


class PromptBody(BodyPart, kw_only=True):
    """The fields that determine the prompt: the body of count_tokens, and the beginning of every other."""

    model: str
    messages: list[MessagesTurn]
    system: str | list[TextBlock] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The predecessor of `output_config.format`."""
    cache_control: Any = None
    """Accepted and not needed: every prefix is cached."""
    context_management: ContextManagement | None = None
    diagnostics: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    """Ignored: it asks about Anthropic's cache."""
    betas: list[str] | None = None
    """Ignored, like the header anthropic-beta."""


class MessagesBody(PromptBody, kw_only=True):
    models: Annotated[list[str], msgspec.Meta(max_length=MAX_CANDIDATES)] | None = None
    """An extension, as in chat completions: the models that take the request if `model` cannot."""
    guardrails: list[str] | None = None
    """An extension: rules of the safety policy that hold besides those that hold anyway."""
    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


_REFUSED: Final = {
    "speed": Refused(("standard",)),
    "mcp_servers": Refused(),
    "container": Refused(),
    "compaction": Refused(),
    "fallbacks": Refused(),
    "thread": Refused(),
    "inference_geo": Refused(("global",)),
}
"""The parameters that kvloom does not support, and the values that ask for nothing."""
_HARMLESS_EDIT: Final = "clear_thinking_"
"""Context edits of this kind leave out old thinking, as chat templates do by themselves."""

_CONTENT: Final = msgspec.json.Decoder(list[ContentBlock])
_CONTENT_BLOCK: Final = msgspec.json.Decoder(ContentBlock)
_RESULT_BLOCK: Final = msgspec.json.Decoder(ResultBlock)
_Body = TypeVar("_Body", bound=PromptBody)


def decode_messages(
    raw: bytes, max_messages: int, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS
) -> MessagesBody:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    body = _checked(_MESSAGES.read(raw, rules, headers), max_messages)
    user_id = body.metadata.user_id if body.metadata is not None else None
    if user_id is not None and len(user_id) > MAX_USER_ID_CHARS:
        field = "metadata.user_id"
        raise invalid_argument(f"{field} has {len(user_id)} characters; at most {MAX_USER_ID_CHARS}.", field)
    return body


def decode_count_tokens(
    raw: bytes, max_messages: int, rules: FieldRules = LENIENT, headers: Mapping[str, str] = NO_HEADERS
) -> PromptBody:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    return _checked(_PROMPT.read(raw, rules, headers), max_messages)


def _with_known_blocks(raw: bytes) -> bytes:
    """The body with nothing in the place of the blocks of its history that cannot be decoded. Those of the message by
    which the new turn asks for something are left, so that the error names them."""
    try:
        body: Any = msgspec.json.decode(raw)
        messages = [message for message in body["messages"] if isinstance(message["content"], list)]
        asked = asked_message([message["role"] for message in body["messages"]])
        asked_one = None if asked is None else body["messages"][asked]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, KeyError):
        return raw
    for message in messages:
        if _is_known(message["content"], _CONTENT):
            continue
        results = [
            block for block in message["content"] if isinstance(block, dict) and block.get("type") == "tool_result"
        ]
        for block in results:
            if isinstance(block.get("content"), list):
                block["content"] = [_known(each, _RESULT_BLOCK) for each in block["content"]]
        if message is not asked_one or results:
            message["content"] = [_known(block, _CONTENT_BLOCK) for block in message["content"]]
    return msgspec.json.encode(body)


def _known(block: Any, decoder: msgspec.json.Decoder[Any]) -> Any:
    if _is_known(block, decoder):
        return block
    text = block.get("text") if isinstance(block, dict) else None
    return {"type": "text", "text": text if isinstance(text, str) else ""}


def _is_known(value: Any, decoder: msgspec.json.Decoder[Any]) -> bool:
    try:
        decoder.decode(msgspec.json.encode(value))
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True


def check_version(version: str | None) -> None:
    """Check the header anthropic-version; it may be missing. Raises KvloomError (INVALID_ARGUMENT)."""
    if version is not None and version not in KNOWN_VERSIONS:
        raise invalid_argument(f"anthropic-version: {version[:64]!r} is not a valid version.", "anthropic-version")


def _checked(body: _Body, max_messages: int) -> _Body:
    check_num_messages(len(body.messages), max_messages)
    for number, edit in enumerate((body.context_management.edits if body.context_management else None) or ()):
        if not edit.type.startswith(_HARMLESS_EDIT):
            field = f"context_management.edits[{number}]"
            raise unsupported(f"{field}: edits of type {edit.type[:64]!r} are not supported.", field)
    return body


_MESSAGES: Final = BodyReader(MessagesBody, _REFUSED, _with_known_blocks)
_PROMPT: Final = BodyReader(PromptBody, _REFUSED, _with_known_blocks)
