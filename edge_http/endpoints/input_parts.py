"""Finds the files and images in what a request says, with their places: in messages of chats, in content blocks of
Messages, and in items of Responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from edge_http.anthropic.blocks import DocumentBlock, ImageBlock, ToolResultBlock
from edge_http.anthropic.requests import MessagesTurn
from edge_http.openai.requests import Message
from kvloom.conversation.earlier import asked_message

_ALONE: Final = ("input_image", "computer_screenshot")
"""Kinds of which one can be all that an item has, without a list."""


class FoundPart(NamedTuple):
    """A part that may be changed, and where it stands."""

    part: Any
    at: str
    is_asked: bool
    """It is of the message by which the new turn asks for something."""


def chat_parts(messages: Sequence[Message], kind: str) -> Iterator[FoundPart]:
    """Yield the parts of chat messages whose type, and the field with their content, is `kind`."""
    asked = asked_message([message.role for message in messages])
    for number, message in enumerate(messages):
        for i, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type == kind:
                yield FoundPart(part, f"messages[{number}].content[{i}].{kind}", number == asked)


def blocks_with_source(
    messages: Sequence[MessagesTurn], kind: type[DocumentBlock] | type[ImageBlock]
) -> Iterator[FoundPart]:
    """Yield the content blocks of a kind, also those within results of tools. Their places are those of their
    sources."""
    asked = asked_message([message.role for message in messages])
    for number, message in enumerate(messages):
        for i, block in enumerate(message.content if isinstance(message.content, list) else ()):
            at = f"messages[{number}].content[{i}]"
            if isinstance(block, kind):
                yield FoundPart(block, f"{at}.source", number == asked)
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                for j, part in enumerate(block.content):
                    if isinstance(part, kind):
                        yield FoundPart(part, f"{at}.content[{j}].source", is_asked=False)


class ItemParts:
    """The parts of some kinds in the items of a response. Only items that have any are decoded."""

    def __init__(
        self,
        earlier: Sequence[msgspec.Raw],
        given: str | Sequence[msgspec.Raw],
        kinds: Sequence[str],
        num_left_out: int = 0,
    ) -> None:
        """`num_left_out`: how many of the caller's items come before those given."""
        self._given = given
        self._num_earlier = len(earlier)
        self._items = [*earlier, *(() if isinstance(given, str) else given)]
        self._decoded = {number: item for number, raw in enumerate(self._items) if (item := _decoded(raw, kinds))}
        self.parts: list[FoundPart] = []
        if not self._decoded:
            return
        roles = [str(msgspec.json.decode(raw, type=_Role).role or "") for raw in self._items]
        asked = None if isinstance(given, str) else asked_message(roles)
        for number, item in self._decoded.items():
            at = f"input[{number - len(earlier) + num_left_out}]"
            self.parts += (FoundPart(part, at + place, number == asked) for place, part in _parts(item, kinds))

    def encoded(self) -> tuple[list[msgspec.Raw], str | list[msgspec.Raw]]:
        """Return the earlier items and the given ones, with what has become of their parts."""
        items = list(self._items)
        for number, item in self._decoded.items():
            items[number] = msgspec.Raw(msgspec.json.encode(item))
        return items[: self._num_earlier], (self._given if isinstance(self._given, str) else items[self._num_earlier :])


class _Role(msgspec.Struct):
    role: Any = None


def _decoded(raw: msgspec.Raw, kinds: Sequence[str]) -> dict[str, Any] | None:
    """The item, if it has parts of these kinds; most have none, and are not decoded."""
    encoded = bytes(raw)
    if not any(kind.encode() in encoded for kind in kinds):
        return None
    item = msgspec.json.decode(encoded)
    return item if isinstance(item, dict) and any(_parts(item, kinds)) else None


def _parts(item: Mapping[str, Any], kinds: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name in ("content", "output"):
        found = item.get(name)
        if isinstance(found, dict) and found.get("type") in kinds and found.get("type") in _ALONE:
            yield f".{name}", found
        elif isinstance(found, list):
            for i, part in enumerate(found):
                if isinstance(part, dict) and part.get("type") in kinds:
                    yield f".{name}[{i}]", part
