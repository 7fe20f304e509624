"""Choices of a link whose text goes straight on, without a word to their sinks until something else is to be said.

A frame has a token for each of many answers. What a token costs is how much memory it touches, which other answers and
other processes have since pushed out of the processor's caches: a slot's way is one object, and how many tokens a
choice has is told to its sink many frames at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvloom.router_link.deferred_token_log import DeferredTokenLog


class FastPathSink(Protocol):
    """What a sink has besides, that lets text fast_writer."""

    def fast_writer(self, index: int) -> Callable[[str], None] | None:
        """Where a choice's text goes from now on, token by token; asked once, when it has begun. It must not raise.
        None: it comes with `on_tokens`, as ever."""
        ...

    def on_fast_path_tokens(self, index: int, token_ids: Sequence[int], num_chars: int) -> None:
        """These tokens, so many characters, have gone that way. Comes before all other news of the choice, and does
        not raise."""
        ...


class OpenChoice:
    """A choice that is under way; it owns one slot."""

    __slots__ = ("handle", "has_begun", "index", "sink")

    def __init__(self, handle: int, index: int, sink: Any) -> None:
        self.handle = handle
        self.index = index
        self.has_begun = False
        """It has had a token."""
        self.sink = sink
        """None: cancelled, the slot waits for its SequenceFinish."""


class LinkFastPath:
    """Of one link."""

    __slots__ = ("_books", "_give_up", "_open_choices", "_ways")

    def __init__(self, open_choices: dict[int, OpenChoice], give_up: Callable[[OpenChoice], None]) -> None:
        """`open_choices`: the link's, by slot. `give_up`: for a choice whose sink raised."""
        self._open_choices = open_choices
        self._give_up = give_up
        self._books = DeferredTokenLog()
        self._ways: dict[int, Callable[[str], None]] = {}
        """Slot → where its text goes."""

    def on_tokens(self, slots: list[int], token_ids: Sequence[int], deltas: Sequence[str]) -> None:
        """The hot path: one token each, no logprobs, to where it goes. Slots that are not in use, or were cancelled,
        are passed over. Takes the arrays over."""
        try:
            ways = list(map(self._ways.__getitem__, slots))
        except KeyError:
            self._on_mixed_tokens(slots, token_ids, deltas)
        else:
            self._books.note(slots, token_ids, deltas)
            for way, delta in zip(ways, deltas, strict=True):
                way(delta)
        if self._books.is_full:  # behind the tokens: they are on their way
            self.tell()

    def _on_mixed_tokens(self, slots: list[int], token_ids: Sequence[int], deltas: Sequence[str]) -> None:
        """Some do not fast_writer."""
        ways = self._ways
        if ways:
            self._books.note([slot if slot in ways else None for slot in slots], token_ids, deltas)
        for slot, token_id, delta in zip(slots, token_ids, deltas, strict=True):
            way = ways.get(slot)
            if way is not None:
                way(delta)
                continue
            choice = self._open_choices.get(slot)
            if choice is None or choice.sink is None:
                continue
            try:
                choice.sink.on_tokens(choice.index, delta, (token_id,), ())
                self._begin(slot, choice)
            except Exception:
                self._give_up(choice)

    def _begin(self, slot: int, choice: OpenChoice) -> None:
        """From its second token on a choice may fast_writer."""
        if not choice.has_begun:
            choice.has_begun = True
            return
        fast_writer = getattr(choice.sink, "fast_writer", None)
        way = None if fast_writer is None else fast_writer(choice.index)
        if way is not None:
            self._ways[slot] = way

    def end(self, slot: int) -> None:
        """Repeatable."""
        if self._ways.pop(slot, None) is not None:
            token_ids, text = self._books.take(slot)
            choice = self._open_choices[slot]
            choice.sink.on_fast_path_tokens(choice.index, token_ids, len(text))

    def tell(self) -> None:
        """All sinks what went on."""
        for slot, token_ids, text in self._books.take_all():
            choice = self._open_choices[slot]
            choice.sink.on_fast_path_tokens(choice.index, token_ids, len(text))

    def end_all(self) -> None:
        self.tell()
        self._ways.clear()
