"""Compacted conversations: an item of the type `compaction` stands for all items before it.

Its content is sealed, and tells all that the model needs of them: what the system said, what the user said, a summary,
and the items behind which the compaction stands though they were not compacted, since they are the turn that was being
answered. So a client may leave out what comes before it, and prompts of later turns begin with the same tokens.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from edge_http.formatting.decoding import decode_body
from edge_http.openai.responses.input_items import COMPACTIONS, MessageItem, kept_text
from kvloom_common.trust.seal import SealError
from kvloom_common.trust.state_seal import StateSealer

PROMPT: Final = (
    "Sum up this conversation for the assistant that will continue it without having read it. Keep what it needs: what "
    "was asked and decided, facts, names, numbers, results of tools, and what is still to be done. Write the summary "
    "alone."
)
_SUMMARY: Final = "Summary of this conversation so far:\n"
_MARK: Final = b'"compaction'


class CompactedPart(msgspec.Struct):
    """The content of a compaction."""

    summary: str
    said: str
    """The words of the user."""
    system: list[msgspec.Raw]
    """The items of the system and of developers, and those that are pinned."""
    turn: list[msgspec.Raw]
    """The items that were not compacted."""

    def items(self) -> list[msgspec.Raw]:
        """The items that the model gets instead of those that were compacted."""
        user = [_message("user", self.said)] if self.said else []
        return [*self.system, *user, _message("assistant", _SUMMARY + self.summary), *self.turn]


class _Kind(msgspec.Struct):
    type: str | None = None
    role: str = ""
    encrypted_content: str | None = None
    pinned: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CompactionSeal:
    """Seals contents for one tenant."""

    sealer: StateSealer
    tenant: str

    def item(self, item_id: str, part: CompactedPart) -> dict[str, Any]:
        sealed = self.sealer.seal(self._name, msgspec.json.encode(part))
        return {"id": item_id, "type": "compaction", "encrypted_content": base64.b64encode(sealed).decode()}

    def part(self, content: str) -> CompactedPart | None:
        """None: it is another tenant's, or of another service."""
        try:
            opened = self.sealer.opened(self._name, base64.b64decode(content, validate=True))
            return msgspec.json.decode(opened, type=CompactedPart)
        except (binascii.Error, ValueError, SealError, msgspec.MsgspecError, RecursionError):
            return None

    @property
    def _name(self) -> str:
        return f"compaction of {self.tenant}"


def unfolded(
    earlier: Sequence[msgspec.Raw], given: str | Sequence[msgspec.Raw], opened: Callable[[str], CompactedPart | None]
) -> tuple[Sequence[msgspec.Raw], str | Sequence[msgspec.Raw], int]:
    """The items before those that are given, and these, where the last compaction that can be opened stands for what
    is before it; and how many of the given ones it has replaced. Raises KvloomError (INVALID_ARGUMENT)."""
    items = () if isinstance(given, str) else given
    for number in range(len(items) - 1, -1, -1):
        if (part := _opened(items[number], f"input[{number}]", opened)) is not None:
            return part.items(), items[number + 1 :], number + 1
    for number in range(len(earlier) - 1, -1, -1):
        if (part := _opened(earlier[number], "input", opened)) is not None:
            return [*part.items(), *earlier[number + 1 :]], given, 0
    return earlier, given, 0


def _opened(raw: msgspec.Raw, at: str, opened: Callable[[str], CompactedPart | None]) -> CompactedPart | None:
    if _MARK not in bytes(raw):
        return None
    item = decode_body(_KIND, raw, at)
    return opened(item.encrypted_content) if item.type in COMPACTIONS and item.encrypted_content else None


def last_turn(items: Sequence[msgspec.Raw]) -> int:
    """The number of the first item of the last turn, which begins with the last message of the user; 0: there is
    nothing before it."""
    for number in range(len(items) - 1, -1, -1):
        if _kind(items[number]) == "user":
            return number
    return 0


def compacted(
    items: Sequence[msgspec.Raw], turn: Sequence[msgspec.Raw], summary: str, max_chars: int | None = None
) -> CompactedPart:
    """The content of a compaction of `items`. Of what the user said it has the latest messages that have at most
    `max_chars` together."""
    said: list[str] = []
    room = max_chars
    for raw in reversed(items):
        if _kind(raw) != "user" or _is_pinned(raw):
            continue
        text = kept_text(decode_body(_MESSAGE, raw, "input").content)
        if room is not None:
            room -= len(text)
            if room < 0:
                break
        said.append(text)
    system = [raw for raw in items if _kind(raw) in ("system", "developer") or _is_pinned(raw)]
    return CompactedPart(summary, "\n\n".join(text for text in reversed(said) if text), system, list(turn))


def user_messages(items: Sequence[msgspec.Raw]) -> list[msgspec.Raw]:
    return [raw for raw in items if _kind(raw) == "user"]


def request_for_summary() -> msgspec.Raw:
    """The item with which the model is asked for one."""
    return _message("user", PROMPT)


def _kind(raw: msgspec.Raw) -> str:
    """The role of a message; "" for other items. Raises KvloomError (INVALID_ARGUMENT)."""
    item = decode_body(_KIND, raw, "input")
    return item.role if item.type in (None, "message") else ""


def _is_pinned(raw: msgspec.Raw) -> bool:
    return bool(decode_body(_KIND, raw, "input").pinned)


def _message(role: str, text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({"type": "message", "role": role, "content": text}))


_KIND: Final = msgspec.json.Decoder(_Kind)
_MESSAGE: Final = msgspec.json.Decoder(MessageItem)
