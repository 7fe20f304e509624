"""The fast path of a link: the text of most choices is forwarded without a call to their sinks.

A frame has one token for each of many answers. The cost of a token is the memory that it touches, because other answers
and other processes have since evicted it from the processor's caches. So the fast path touches one object per slot, the
function that the slot's text goes to, and reports to the sinks how many tokens they got for many frames at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvloom.router_link.deferred_token_log import DeferredTokenLog


class FastPathSink(Protocol):
    """A sink implements this besides `Sink` if its text may take the fast path."""

    def fast_writer(self, index: int) -> Callable[[str], None] | None:
        """The function that gets a choice's text from now on, token by token. Called once per choice, when the choice
        has begun. The function must not raise. None: the text is passed to `on_tokens`, as before."""
        ...

    def on_fast_path_tokens(self, index: int, token_ids: Sequence[int], num_chars: int) -> None:
        """Reports tokens whose text, `num_chars` characters, the fast writer has got. Called before any other method
        for that choice; must not raise."""
        ...


class OpenChoice:
    """A choice in flight. It owns one slot."""

    __slots__ = ("handle", "has_begun", "index", "sink")

    def __init__(self, handle: int, index: int, sink: Any) -> None:
        self.handle = handle
        self.index = index
        self.has_begun = False
        """True once the choice has had a token."""
        self.sink = sink
        """None once the choice was cancelled and its slot waits for the SequenceFinish."""


class LinkFastPath:
    """The fast path of one link."""

    __slots__ = ("_give_up", "_open_choices", "_token_log", "_writers")

    def __init__(self, open_choices: dict[int, OpenChoice], give_up: Callable[[OpenChoice], None]) -> None:
        """`open_choices`: the link's choices, by slot. `give_up` is called with a choice whose sink raised."""
        self._open_choices = open_choices
        self._give_up = give_up
        self._token_log = DeferredTokenLog()
        self._writers: dict[int, Callable[[str], None]] = {}
        """By slot: the function that gets its text."""

    def on_tokens(self, slots: list[int], token_ids: Sequence[int], deltas: Sequence[str]) -> None:
        """The hot path: forward one token of each slot, without logprobs. Slots that are not in use, or were cancelled,
        are skipped. The arrays belong to this object from now on."""
        try:
            writers = list(map(self._writers.__getitem__, slots))
        except KeyError:
            self._on_mixed_tokens(slots, token_ids, deltas)
        else:
            self._token_log.note(slots, token_ids, deltas)
            for writer, delta in zip(writers, deltas, strict=True):
                writer(delta)
        if self._token_log.is_full:  # only now: the tokens have been forwarded
            self.flush()

    def _on_mixed_tokens(self, slots: list[int], token_ids: Sequence[int], deltas: Sequence[str]) -> None:
        """Forward a frame in which some slots are not on the fast path."""
        writers = self._writers
        if writers:
            self._token_log.note([slot if slot in writers else None for slot in slots], token_ids, deltas)
        for slot, token_id, delta in zip(slots, token_ids, deltas, strict=True):
            writer = writers.get(slot)
            if writer is not None:
                writer(delta)
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
        """Note that a choice has had a token. From its second token on it may take the fast path."""
        if not choice.has_begun:
            choice.has_begun = True
            return
        fast_writer = getattr(choice.sink, "fast_writer", None)
        writer = None if fast_writer is None else fast_writer(choice.index)
        if writer is not None:
            self._writers[slot] = writer

    def end(self, slot: int) -> None:
        """Take a slot off the fast path, if it is on it."""
        if self._writers.pop(slot, None) is not None:
            token_ids, text = self._token_log.take(slot)
            choice = self._open_choices[slot]
            choice.sink.on_fast_path_tokens(choice.index, token_ids, len(text))

    def flush(self) -> None:
        """Report all forwarded tokens to their sinks."""
        for slot, token_ids, text in self._token_log.take_all():
            choice = self._open_choices[slot]
            choice.sink.on_fast_path_tokens(choice.index, token_ids, len(text))

    def end_all(self) -> None:
        """Report all forwarded tokens, and take every slot off the fast path."""
        self.flush()
        self._writers.clear()
