"""Clears answer text that the safety service need not see, without a round trip (see Prefilter in
safety_service.proto).

A token's round trip to the service takes three wake-ups, but most tokens cannot begin anything forbidden. Nothing is
judged here: text in which a forbidden string may begin is sent to the service, and so is all text that follows it until
the service has cleared it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from kvloom.v1 import safety_service_pb2
from router.core.actions import AnswerScope
from router.core.events import AnswersScreened

_SEPARATOR: Final = "\0"
_END: Final = r"(?:\x00|\Z)"
_GAP: Final = r"[^0-9a-z\x00]*"
"""Any number of characters that may stand between letters which are spaced out. The service counts them."""
_Tree: TypeAlias = "dict[str, _Tree]"
"""A trie of beginnings, character by character."""


class Prefilter:
    """Recognises text in which a forbidden string may begin. It is exact in one direction: text that passes is
    clear."""

    __slots__ = ("_folded", "_look_alike", "_look_alikes", "_plain")

    def __init__(
        self,
        beginnings: Iterable[str],
        folded_beginnings: Iterable[str],
        look_alike_beginnings: Iterable[str] = (),
        look_alikes: Mapping[str, str] = {},
        spaced_beginnings: Iterable[str] = (),
        spaced_look_alike_beginnings: Iterable[str] = (),
        *,
        at_word_beginnings: bool = False,
    ) -> None:
        self._plain = _expression(beginnings, space=re.escape(" "))
        words = at_word_beginnings
        self._folded = _expression(folded_beginnings, spaced_beginnings, at_word_beginnings=words)
        self._look_alike = _expression(look_alike_beginnings, spaced_look_alike_beginnings, at_word_beginnings=words)
        self._look_alikes = str.maketrans(dict(look_alikes))

    @classmethod
    def from_policy(cls, policy: safety_service_pb2.PolicyState) -> Prefilter | None:
        """Returns None if the policy has no prefilter, so that every text has to be sent."""
        if not policy.HasField("answer_prefilter"):
            return None
        prefilter = policy.answer_prefilter
        return cls(
            prefilter.beginnings,
            prefilter.folded_beginnings,
            prefilter.look_alike_beginnings,
            prefilter.look_alikes,
            prefilter.spaced_beginnings,
            prefilter.spaced_look_alike_beginnings,
            at_word_beginnings=prefilter.at_word_beginnings,
        )

    def is_suspicious(self, text: str) -> bool:
        """`text` may be several deltas joined by NUL characters."""
        if not text.isascii():
            return True
        if self._plain is not None and self._plain.search(text) is not None:
            return True
        if self._folded is not None and self._folded.search(text.lower()) is not None:
            return True
        if self._look_alike is None:
            return False
        return self._look_alike.search(text.lower().translate(self._look_alikes)) is not None


class PrefilteredAnswers:
    """The answers that one connection screens, by slot."""

    def __init__(self, *, are_searched: bool = False) -> None:
        """`are_searched`: the core has searched what is new, by the current prefilter. It has not where an answer began
        under another one."""
        self._are_searched = are_searched
        self.prefilter: Prefilter | None = None
        """The prefilter of the current policy. An answer keeps the one that was current when the service first received
        text of it."""
        self._answers: dict[int, _Answer] = {}

    @property
    def num_open(self) -> int:
        return len(self._answers)

    def __contains__(self, slot: int) -> bool:
        return slot in self._answers

    def move_clear(self, successor: PrefilteredAnswers, closing: Collection[int]) -> None:
        """Hands the answers that the service has cleared completely to another connection, except those in `closing`.
        All that the next service needs of them is their length and last character."""
        moved = [slot for slot, answer in self._answers.items() if answer.is_clear and slot not in closing]
        for slot in moved:
            answer = successor._answers[slot] = self._answers.pop(slot)
            answer.is_open, answer.is_moved = False, True
            answer.num_skipped = answer.num_chars

    def take(
        self,
        slots: Sequence[int],
        deltas: Sequence[str],
        close_slots: Sequence[int],
        outgoing: Outgoing,
        skips: Iterable[tuple[int, int, str]] = (),
        scopes: Iterable[AnswerScope] = (),
    ) -> AnswersScreened | None:
        """Puts the text that must be screened into `outgoing`. Returns what is clear or closed at once, or None if that
        is nothing. `skips` are (slot, number of characters, the last of them) that the core has cleared before the
        slot's delta; `scopes` are those of slots that open."""
        current = self.prefilter
        is_plain: bool | None = None
        answers = self._answers
        for scope in scopes:
            answers[scope.slot] = _Answer(scope)
        for slot, num_chars, last_char in skips:
            answer = answers.get(slot)
            if answer is None:
                answer = answers[slot] = _Answer()
            answer.num_chars += num_chars
            answer.num_skipped += num_chars
            answer.last_char = last_char
        clear_slots: list[int] = []
        num_clear_chars: list[int] = []
        for slot, delta in zip(slots, deltas, strict=True):
            answer = answers.get(slot)
            if answer is None:
                answer = answers[slot] = _Answer()
            answer.num_chars += len(delta)
            if answer.is_clear and not (self._are_searched and answer.follows(current)):
                own = answer.prefilter if answer.is_open else current
                if is_plain is None:
                    is_plain = current is not None and not current.is_suspicious(_SEPARATOR.join(deltas))
                if (is_plain and own is current) or (own is not None and not own.is_suspicious(delta)):
                    answer.num_skipped += len(delta)
                    answer.last_char = delta[-1]
                    clear_slots.append(slot)
                    num_clear_chars.append(answer.num_chars)
                    continue
            self._send(slot, answer, delta, outgoing)
        closed_slots = [slot for slot in close_slots if self._close(slot, outgoing)]
        if not clear_slots and not closed_slots:
            return None
        return AnswersScreened(clear_slots, num_clear_chars, halts=[], closed_slots=closed_slots)

    def note(self, response: safety_service_pb2.ScreenResponse) -> None:
        """Records what the service has cleared and closed."""
        for slot, num_clear_chars in zip(response.slots, response.num_clear_chars, strict=True):
            answer = self._answers.get(slot)
            if answer is not None:
                answer.is_clear = num_clear_chars == answer.num_chars
        for slot in response.closed_slots:
            self._answers.pop(slot, None)

    def _send(self, slot: int, answer: _Answer, delta: str, outgoing: Outgoing) -> None:
        if not answer.is_open:
            answer.is_open = True
            answer.prefilter = self.prefilter
            if answer.scope is not None:
                outgoing.scopes.append(answer.scope)
        answer.is_clear = False
        if answer.num_skipped:
            outgoing.skip(slot, answer.num_skipped, answer.last_char)
            answer.num_skipped = 0
        answer.last_char = delta[-1]
        outgoing.add(slot, delta)

    def _close(self, slot: int, outgoing: Outgoing) -> bool:
        """Returns True if the answer is closed at once because the service has never received any of it."""
        answer = self._answers.get(slot)
        if answer is not None and not answer.is_open:
            del self._answers[slot]
            return True
        outgoing.close(slot)
        return False


class Outgoing:
    """The answers' part of the next frame to the service, with each answer's text joined."""

    def __init__(self) -> None:
        self.deltas: dict[int, str] = {}
        self.skips: dict[int, tuple[int, str]] = {}
        """Slot -> (number of characters, the last of them), which come before the slot's delta."""
        self.close_slots: list[int] = []
        self.scopes: list[AnswerScope] = []
        """Those of the slots that the service gets to know."""

    def __bool__(self) -> bool:
        return bool(self.deltas or self.close_slots)

    def skip(self, slot: int, num_chars: int, last_char: str) -> None:
        self.skips[slot] = (num_chars, last_char)

    def add(self, slot: int, delta: str) -> None:
        self.deltas[slot] = self.deltas[slot] + delta if slot in self.deltas else delta

    def close(self, slot: int) -> None:
        self.close_slots.append(slot)


class _Answer:
    __slots__ = ("is_clear", "is_moved", "is_open", "last_char", "num_chars", "num_skipped", "prefilter", "scope")

    def __init__(self, scope: AnswerScope | None = None) -> None:
        self.scope = scope
        self.prefilter: Prefilter | None = None
        self.num_chars = 0
        self.num_skipped = 0
        """How many characters at the end the service has not received."""
        self.last_char = ""
        self.is_open = False
        """True when the service has received any of its text."""
        self.is_clear = True
        """True when the service has cleared everything that it received."""
        self.is_moved = False
        """True when another connection has screened its beginning."""

    def follows(self, current: Prefilter | None) -> bool:
        """True when the core has the prefilter that is current here as that of the answer."""
        return not self.is_moved and (self.prefilter is None or self.prefilter is current)


def _expression(
    beginnings: Iterable[str],
    spaced_beginnings: Iterable[str] = (),
    space: str = r"\s+",
    *,
    at_word_beginnings: bool = False,
) -> re.Pattern[str] | None:
    """Returns an expression that finds, in ASCII text, one of these strings or a prefix of one at the end of a delta.
    Returns None if none of the strings can occur."""
    alternatives: list[str] = []
    for tree, gap in ((_tree(beginnings), ""), (_tree(spaced_beginnings), _GAP)):
        for first in tree:
            found = _alternatives({first: tree[first]}, space, gap)
            if at_word_beginnings and first.isalnum():
                # The assertion follows the character, by which Python finds the positions to be tried.
                found = [f"{first}(?<![0-9a-z]{first}){each.removeprefix(first)}" for each in found]
            alternatives += found
    return re.compile("|".join(alternatives)) if alternatives else None


def _tree(beginnings: Iterable[str]) -> _Tree:
    tree: _Tree = {}
    for beginning in beginnings:
        node = tree
        for character in beginning:
            node = node.setdefault(character, {})
        node[_SEPARATOR] = {}  # The beginning is complete here, whatever follows.
    return tree


def _alternatives(tree: _Tree, space: str, gap: str = "") -> list[str]:
    """Skips characters outside ASCII, which do not occur in the text."""
    found: list[str] = []
    for character, rest in tree.items():
        if not character.isascii():
            continue
        own = space if character == " " else re.escape(character)
        if _SEPARATOR in rest:
            found.append(own)
        else:
            found.append(f"{own}{gap}(?:{'|'.join([*_alternatives(rest, space, gap), _END])})")
    return found
