"""The input of a request as the messages of a conversation.

What an assistant did in one turn is several items: its reasoning, its messages and its calls. They become one message
where a chat template can show them as one: reasoning, then text, then calls. Calls of any kind of tool are calls, and
items of which a model can make nothing are left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from edge_http.formatting.client_tools import flat_name
from edge_http.formatting.decoding import decode_body
from edge_http.openai.requests import TEXT_PARTS, OpenStruct, refused_part
from kvloom.conversation.earlier import MEDIA, asked_message, omitted
from kvloom.errors import invalid_argument
from kvloom.errors import unsupported as unsupported_error
from kvloom.text.chat_message import ChatMessage, ToolCall
from kvloom_common.conversation.history import KnownCalls

_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Maps the roles of the API to those of chat templates."""
COMPACTIONS: Final = ("compaction", "compaction_summary")
_COMPACTED: Final = "[An earlier part of this conversation was compacted by another service and cannot be read.]"


class InputContentPart(OpenStruct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class Item(OpenStruct, kw_only=True):
    """The fields by which an item of any kind is known. Others are left out."""

    type: str | None = None


class MessageItem(Item, kw_only=True):
    role: str
    content: str | list[InputContentPart] | None = None
    pinned: bool | None = None
    """An extension: it stays when others are left out, or summed up."""


class CallItem(Item, kw_only=True):
    """A call of any tool: what it was given stands in one of several fields."""

    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    """The text for a tool that takes text."""
    action: Any = None
    operation: Any = None
    code: Any = None
    output: Any = None
    """The result of a tool that a server ran."""
    outputs: Any = None
    error: Any = None


class CallOutputItem(Item, kw_only=True):
    output: Any = None
    call_id: str | None = None
    name: str | None = None


class ReasoningItem(Item, kw_only=True):
    summary: str | list[InputContentPart] | None = None
    content: str | list[InputContentPart] | None = None


class _Kind(msgspec.Struct):
    type: str | None = None
    role: str = ""
    id: str | None = None


_KIND: Final = msgspec.json.Decoder(_Kind)
_MESSAGE: Final = msgspec.json.Decoder(MessageItem)
_CALL: Final = msgspec.json.Decoder(CallItem)
_OUTPUT: Final = msgspec.json.Decoder(CallOutputItem)
_REASONING: Final = msgspec.json.Decoder(ReasoningItem)
_CALL_KIND: Final = "_call"
_OUTPUT_KIND: Final = "_call_output"


def conversation(
    given: str | Sequence[msgspec.Raw],
    instructions: str | None,
    earlier: Sequence[msgspec.Raw] = (),
    num_left_out: int = 0,
) -> list[ChatMessage]:
    """`earlier`: items that come before what is given, of which the caller's first `num_left_out` are not a part.
    Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) that names the field."""
    items = _Items(len(earlier) - num_left_out)
    if isinstance(given, str):
        messages = [*items.messages(earlier), ChatMessage("user", given)]
    else:
        messages = items.messages([*earlier, *given])
    if not messages:
        raise invalid_argument("input has nothing that the model could read.", "input")
    if not instructions:
        return messages
    # Most templates know one system message, at the beginning.
    while messages and messages[0].role == "system":
        instructions = f"{instructions}\n\n{messages.pop(0).content}"
    return [ChatMessage("system", instructions), *messages]


def check_items(given: Sequence[msgspec.Raw], field: str) -> None:
    """Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER) for items that no response could be given."""
    _Items(field=field, takes_files=True).messages(given)


def references_in(given: str | Sequence[msgspec.Raw]) -> dict[int, str]:
    """The ids of the stored items to which an input refers, by their places."""
    found: dict[int, str] = {}
    for number, raw in enumerate(() if isinstance(given, str) else given):
        kind = decode_body(_KIND, raw, f"input[{number}]")
        if kind.type == "item_reference" and kind.id:
            found[number] = kind.id
    return found


@dataclasses.dataclass(slots=True)
class _Turn:
    """Collects what an assistant did since the last message of anyone else."""

    reasoning: list[str] = dataclasses.field(default_factory=list)
    text: str | None = None
    calls: list[ToolCall] = dataclasses.field(default_factory=list)
    is_pinned: bool = False

    @property
    def has_more_than_reasoning(self) -> bool:
        return self.text is not None or bool(self.calls)


class _Items:
    """Puts messages together, item by item."""

    def __init__(self, num_earlier: int = 0, field: str = "input", *, takes_files: bool = False) -> None:
        """The first `num_earlier` items are not the caller's, who counts the others from 0; less than 0: so many of the
        caller's are left out before them. `takes_files`: no model reads the items yet."""
        self._num_earlier = num_earlier
        self._field = field
        self._takes_files = takes_files
        self._messages: list[ChatMessage] = []
        self._turn = _Turn()
        self._calls = KnownCalls()

    def messages(self, items: Sequence[msgspec.Raw]) -> list[ChatMessage]:
        names = [f"{self._field}[{number - self._num_earlier}]" for number in range(len(items))]
        kinds = [decode_body(_KIND, raw, name) for raw, name in zip(items, names, strict=True)]
        asked = asked_message([kind.role for kind in kinds])
        for number, (raw, kind) in enumerate(zip(items, kinds, strict=True)):
            self._add(raw, kind.type or "message", names[number], is_asked=number == asked)
        self._end_turn()
        return self._messages

    def _add(self, raw: msgspec.Raw, kind: str, at: str, *, is_asked: bool) -> None:
        if kind == "message":
            self._add_message(decode_body(_MESSAGE, raw, at), at, is_asked=is_asked)
        elif kind == "reasoning":
            self._add_reasoning(decode_body(_REASONING, raw, at))
        elif kind.endswith(_CALL_KIND):
            self._add_call(decode_body(_CALL, raw, at), kind)
        elif kind.endswith(_OUTPUT_KIND):
            self._add_output(decode_body(_OUTPUT, raw, at))
        elif kind in COMPACTIONS:
            self._end_turn()
            self._messages.append(ChatMessage("system", _COMPACTED))
        elif kind == "item_reference":
            # Vercel's AI SDK sends references unless its option `store` is false.
            message = (
                f"{at}.type: item references are not supported, because responses are not stored. "
                "Send store: false, and the items themselves."
            )
            raise unsupported_error(message, f"{at}.type")
        # All other items tell of tools, settings and approvals that are not this server's.

    def _add_message(self, item: MessageItem, at: str, *, is_asked: bool) -> None:
        role = _ROLES.get(item.role)
        if role is None:
            raise invalid_argument(f"{at}.role must be one of {', '.join(_ROLES)}.", f"{at}.role")
        content = item.content
        if self._takes_files and isinstance(content, list):
            content = [part for part in content if part.type != "input_file"]
        text = _asked_text(content, f"{at}.content") if is_asked else kept_text(content)
        if role != "assistant":
            self._end_turn()
            self._messages.append(ChatMessage(role, text, is_pinned=bool(item.pinned)))
            return
        if self._turn.has_more_than_reasoning:
            self._end_turn()
        self._turn.text, self._turn.is_pinned = text, bool(item.pinned)

    def _add_call(self, item: CallItem, kind: str) -> None:
        given = [item.arguments, item.action, item.operation]
        if item.input is not None or item.code is not None:
            given.append({"input": item.input} if item.input is not None else {"code": item.code})
        arguments = next((value for value in given if value is not None), None)
        result = next((value for value in (item.output, item.outputs, item.error) if value is not None), None)
        if item.call_id is None and item.name is None and arguments is None:
            return  # a search and the like, of which nothing is told
        text = arguments if isinstance(arguments, str) else "" if arguments is None else _json_text(arguments)
        name = item.name or kind.removesuffix(_CALL_KIND)
        call = self._calls.add(item.call_id, flat_name(item.namespace, name) if item.namespace else name, text)
        self._turn.calls.append(call)
        if result is not None:
            self._add_result(call.id, call.name, result)

    def _add_output(self, item: CallOutputItem) -> None:
        self._add_result(item.call_id, item.name, item.output)

    def _add_result(self, call_id: str | None, name: str | None, output: Any) -> None:
        self._end_turn()
        self._messages.append(self._calls.result(call_id, name, _output_text(output)))

    def _add_reasoning(self, item: ReasoningItem) -> None:
        """Adds reasoning. Encrypted reasoning is another server's, and left out."""
        if self._turn.has_more_than_reasoning:
            self._end_turn()
        text = kept_text(item.content or item.summary)
        if text:
            self._turn.reasoning.append(text)

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, _Turn()
        if turn.has_more_than_reasoning or turn.reasoning:
            reasoning = "\n".join(turn.reasoning)
            calls, is_pinned = tuple(turn.calls), turn.is_pinned
            message = ChatMessage("assistant", turn.text or "", calls, reasoning=reasoning, is_pinned=is_pinned)
            self._messages.append(message)


def kept_text(content: str | Sequence[InputContentPart] | None) -> str:
    """The text of a message of the history. Images and the like are noted, and other parts without a text left out."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        omitted(MEDIA[part.type]) if part.type in MEDIA else part.text or part.refusal or "" for part in content
    )


def _output_text(output: Any) -> str:
    """The text of a tool's result: a text, a list of parts, or any JSON."""
    if output is None or isinstance(output, str):
        return output or ""
    if isinstance(output, list) and all(isinstance(part, dict) and "type" in part for part in output):
        return kept_text(msgspec.convert([_as_part(part) for part in output], list[InputContentPart]))
    return _json_text(output)


def _as_part(part: dict[str, Any]) -> dict[str, Any]:
    """A part with a text; that of an unknown kind is its JSON."""
    kind, text = str(part["type"]), part.get("text")
    if kind in MEDIA or isinstance(text, str):
        return {"type": kind, "text": text if isinstance(text, str) else None}
    return {"type": "text", "text": _json_text(part)}


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _asked_text(content: str | Sequence[InputContentPart] | None, field: str) -> str:
    """The text of parts, joined in order. Raises KvloomError (INVALID_ARGUMENT, UNSUPPORTED_PARAMETER)."""
    if content is None:
        raise invalid_argument(f"{field} is missing.", field)
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{field}[{number}]") for number, part in enumerate(content))


def _part_text(part: InputContentPart, at: str) -> str:
    name = "refusal" if part.type == "refusal" else "text"
    if name == "text" and part.type not in TEXT_PARTS:
        raise refused_part(part.type, at)
    text = getattr(part, name)
    if text is None:
        raise invalid_argument(f"{at}.{name} is missing.", f"{at}.{name}")
    return text
