"""The input of a request as the messages of a conversation.

What an assistant did in one turn is several items: its reasoning, its messages and its calls. They become one message
where a chat template can show them as one: reasoning, then text, then calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edge_http.formatting.decoding import decode_body
from edge_http.openai import unsupported
from edge_http.openai.messages import checked_arguments
from edge_http.openai.requests import Body
from edge_http.openai.unsupported import Harmless
from kvloom.errors import invalid_argument
from kvloom.errors import unsupported as unsupported_error
from kvloom.text.chat_message import ChatMessage, ToolCall

_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Maps the roles of the API to those of chat templates."""


class ContentPart(Body, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    """Ignored, like the next two: clients send back what they got."""
    logprobs: Any = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = None
    detail: Any = None
    file_data: Any = None
    file_id: Any = None
    file_url: Any = None
    filename: Any = None
    image_url: Any = None
    input_audio: Any = None


class Item(Body, kw_only=True):
    """The fields that all items may have. Only the type counts."""

    type: str | None = None
    id: str | None = None
    status: str | None = None


class MessageItem(Item, kw_only=True):
    role: str
    content: str | list[ContentPart]
    phase: str | None = None


class FunctionCallItem(Item, kw_only=True):
    call_id: str
    name: str
    arguments: str
    namespace: Any = None
    caller: Any = None
    is_async: Any = msgspec.field(name="async", default=None)
    parsed_arguments: Any = None
    """Ignored: OpenAI's client adds it to what it got."""


class FunctionCallOutputItem(Item, kw_only=True):
    output: str | list[ContentPart]
    call_id: str
    name: str | None = None
    namespace: Any = None
    caller: Any = None


class ReasoningItem(Item, kw_only=True):
    summary: list[ContentPart] | None = None
    content: list[ContentPart] | None = None
    encrypted_content: str | None = None


class _Kind(msgspec.Struct):
    type: str | None = None


_PARTS: Final[Harmless] = dict.fromkeys(
    ("prompt_cache_breakpoint", "detail", "file_data", "file_id", "file_url", "filename", "image_url", "input_audio"),
    (),
)
_CALLS: Final[Harmless] = {"namespace": (), "caller": ({"type": "direct"},)}
_ENCRYPTED: Final[Harmless] = {"encrypted_content": ("",)}
_KIND: Final = msgspec.json.Decoder(_Kind)
_MESSAGE: Final = msgspec.json.Decoder(MessageItem)
_CALL: Final = msgspec.json.Decoder(FunctionCallItem)
_OUTPUT: Final = msgspec.json.Decoder(FunctionCallOutputItem)
_REASONING: Final = msgspec.json.Decoder(ReasoningItem)


def conversation(given: str | Sequence[msgspec.Raw], instructions: str | None) -> list[ChatMessage]:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    messages = [ChatMessage("user", given)] if isinstance(given, str) else _Items().messages(given)
    if not instructions:
        return messages
    # Most templates know one system message, at the beginning.
    while messages and messages[0].role == "system":
        instructions = f"{instructions}\n\n{messages.pop(0).content}"
    return [ChatMessage("system", instructions), *messages]


@dataclasses.dataclass(slots=True)
class _Turn:
    """What an assistant did since the last message of anyone else."""

    reasoning: list[str] = dataclasses.field(default_factory=list)
    text: str | None = None
    calls: list[ToolCall] = dataclasses.field(default_factory=list)

    @property
    def has_more_than_reasoning(self) -> bool:
        return self.text is not None or bool(self.calls)


class _Items:
    """Puts messages together, item by item."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._turn = _Turn()
        self._names: dict[str, str] = {}
        """The function of each call so far, by the call's id."""

    def messages(self, items: Sequence[msgspec.Raw]) -> list[ChatMessage]:
        for number, raw in enumerate(items):
            self._add(raw, f"input[{number}]")
        self._end_turn()
        return self._messages

    def _add(self, raw: msgspec.Raw, at: str) -> None:
        match decode_body(_KIND, raw, at).type:
            case None | "message":
                self._add_message(decode_body(_MESSAGE, raw, at), at)
            case "function_call":
                self._add_call(decode_body(_CALL, raw, at), at)
            case "function_call_output":
                self._add_output(decode_body(_OUTPUT, raw, at), at)
            case "reasoning":
                self._add_reasoning(decode_body(_REASONING, raw, at), at)
            case "item_reference":
                # Vercel's AI SDK sends references unless its option `store` is false.
                message = (
                    f"{at}.type: item references are not supported, because responses are not stored. "
                    "Send store: false, and the items themselves."
                )
                raise unsupported_error(message, f"{at}.type")
            case other:
                message = f"{at}.type: items of type {other[:32]!r} are not supported."
                raise unsupported_error(message, f"{at}.type")

    def _add_message(self, item: MessageItem, at: str) -> None:
        role = _ROLES.get(item.role)
        if role is None:
            raise invalid_argument(f"{at}.role must be one of {', '.join(_ROLES)}.", f"{at}.role")
        text = _text(item.content, f"{at}.content")
        if role != "assistant":
            self._end_turn()
            self._messages.append(ChatMessage(role, text))
            return
        if self._turn.has_more_than_reasoning:
            self._end_turn()
        self._turn.text = text

    def _add_call(self, item: FunctionCallItem, at: str) -> None:
        unsupported.refuse(item, _CALLS, f"{at}.")
        if not item.call_id:
            raise invalid_argument(f"{at}.call_id must not be empty.", f"{at}.call_id")
        arguments = checked_arguments(item.arguments, f"{at}.arguments")
        self._turn.calls.append(ToolCall(item.call_id, item.name, arguments))
        self._names[item.call_id] = item.name

    def _add_output(self, item: FunctionCallOutputItem, at: str) -> None:
        unsupported.refuse(item, _CALLS, f"{at}.")
        name = self._names.get(item.call_id)
        if name is None:
            field = f"{at}.call_id"
            raise invalid_argument(f"{field}: no earlier item is a call {item.call_id[:64]!r}.", field)
        self._end_turn()
        text = _text(item.output, f"{at}.output")
        self._messages.append(ChatMessage("tool", text, tool_call_id=item.call_id, name=name))

    def _add_reasoning(self, item: ReasoningItem, at: str) -> None:
        unsupported.refuse(item, _ENCRYPTED, f"{at}.")
        if self._turn.has_more_than_reasoning:
            self._end_turn()
        name = "content" if item.content else "summary"
        text = _text(getattr(item, name) or [], f"{at}.{name}")
        if text:
            self._turn.reasoning.append(text)

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, _Turn()
        if turn.has_more_than_reasoning or turn.reasoning:
            reasoning = "\n".join(turn.reasoning)
            self._messages.append(ChatMessage("assistant", turn.text or "", tuple(turn.calls), reasoning=reasoning))


_TEXT_TYPES: Final = frozenset(("input_text", "output_text", "text", "summary_text", "reasoning_text"))


def _text(content: str | Sequence[ContentPart], field: str) -> str:
    """The text of parts, joined in order."""
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{field}[{number}]") for number, part in enumerate(content))


def _part_text(part: ContentPart, at: str) -> str:
    name = "refusal" if part.type == "refusal" else "text"
    if name == "text" and part.type not in _TEXT_TYPES:
        message = f"{at}.type: content parts of type {part.type[:32]!r} are not supported."
        raise unsupported_error(message, f"{at}.type")
    unsupported.refuse(part, _PARTS, f"{at}.")
    text = getattr(part, name)
    if text is None:
        raise invalid_argument(f"{at}.{name} is missing.", f"{at}.{name}")
    return text
