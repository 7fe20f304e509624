"""The choices in flight over one link to a router: their slots, and the calls to their sinks.

A sink that raises fails only its own request.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvloom.router_link.fast_path import LinkFastPath, OpenChoice
from kvloom.router_link.request import LinkRequest
from kvloom.v1.error_reason_pb2 import Error
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, SequenceFinish, SequenceStart, TokenLogprobs

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Receives the progress of one request. `index` is the choice's number. `on_finish` is the last call for an
    index."""

    def on_start(self, index: int, start: SequenceStart) -> None: ...

    def on_tokens(
        self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> None: ...

    def on_finish(self, index: int, finish: SequenceFinish) -> None: ...


class OpenChoices:
    """The open choices of one link, by slot."""

    def __init__(self, cancel: Callable[[int], None]) -> None:
        """`cancel` is the link's method, called with the handle of a request whose sink raised; it calls `cancel`
        here."""
        self._cancel = cancel
        self._by_slot: dict[int, OpenChoice] = {}
        self._slots_by_handle: dict[int, list[int]] = {}
        """The slots of requests that have not been cancelled."""
        self._free_slots: list[int] = []
        self._next_slot = 0
        self._handles = itertools.count(1)
        self.fast_path = LinkFastPath(self._by_slot, self._give_up)
        """Handles the frames that have one token for each of their slots and no logprobs."""

    def __bool__(self) -> bool:
        return bool(self._by_slot)

    def open(self, request: LinkRequest, sink: Sink) -> tuple[int, list[int]]:
        """Allocate a slot for each choice: those of `request.partial_choices`, otherwise all n. Returns the request's
        handle and the slots."""
        handle = next(self._handles)
        indices = [choice.index for choice in request.partial_choices] if request.partial_choices else range(request.n)
        slots: list[int] = []
        for index in indices:
            if self._free_slots:
                slot = self._free_slots.pop()
            else:
                slot = self._next_slot = self._next_slot + 1
            self._by_slot[slot] = OpenChoice(handle, index, sink)
            slots.append(slot)
        self._slots_by_handle[handle] = slots
        return handle, slots

    def cancel(self, handle: int) -> list[int]:
        """Stop calling the request's sink. Returns its slots, each of which stays allocated until its finish arrives.
        For an unknown handle there are none."""
        slots = self._slots_by_handle.pop(handle, [])
        for slot in slots:
            self.fast_path.end(slot)
            self._by_slot[slot].sink = None
        return slots

    def is_cancelled(self, slot: int) -> bool:
        """True when the slot's choice was cancelled and its finish has not arrived."""
        choice = self._by_slot.get(slot)
        return choice is not None and choice.sink is None

    # -- progress; that of slots that are not in use, or were cancelled, is dropped -----------------------------------

    def on_start(self, slot: int, start: SequenceStart) -> None:
        choice = self._by_slot.get(slot)
        if choice is not None and choice.sink is not None:
            try:
                choice.sink.on_start(choice.index, start)
            except Exception:
                self._give_up(choice)

    def on_ragged_tokens(
        self,
        slots: Sequence[int],
        num_tokens: Sequence[int],
        token_ids: Sequence[int],
        deltas: Sequence[str],
        logprobs: Mapping[int, Sequence[TokenLogprobs]],
    ) -> None:
        """Tokens of a frame with any number of tokens per slot (`num_tokens` is empty: one each), and logprobs by
        slot."""
        self.fast_path.flush()
        counts = num_tokens or [1] * len(slots)
        position = 0
        for slot, count, delta in zip(slots, counts, deltas, strict=True):
            choice = self._by_slot.get(slot)
            if choice is not None and choice.sink is not None:
                ids = token_ids[position : position + count]
                try:
                    choice.sink.on_tokens(choice.index, delta, ids, logprobs.get(slot, ()))
                except Exception:
                    self._give_up(choice)
            position += count

    def on_finish(self, finish: SequenceFinish) -> None:
        """Finish a choice and free its slot."""
        slot = finish.slot
        choice = self._by_slot.get(slot)
        if choice is None:
            return
        self.fast_path.end(slot)
        del self._by_slot[slot]
        self._free_slots.append(slot)
        slots = self._slots_by_handle.get(choice.handle)
        if slots is not None:
            slots.remove(slot)
            if not slots:
                del self._slots_by_handle[choice.handle]
        self._finish(choice, finish)

    def end_all(self, error: Error) -> None:
        """Finish all choices with `error`, and free all slots."""
        self.fast_path.end_all()
        lost = dict(self._by_slot)
        self._by_slot.clear()
        self._slots_by_handle.clear()
        self._free_slots.clear()
        self._next_slot = 0
        for slot, choice in lost.items():
            self._finish(choice, SequenceFinish(slot=slot, reason=FINISH_REASON_ERROR, error=error))

    def _finish(self, choice: OpenChoice, finish: SequenceFinish) -> None:
        if choice.sink is not None:
            try:
                choice.sink.on_finish(choice.index, finish)
            except Exception:
                self._give_up(choice)

    def _give_up(self, choice: OpenChoice) -> None:
        """Cancel the request of a sink that raised. The other requests of the link continue."""
        log.exception("A sink raised; its request is cancelled.")
        self._cancel(choice.handle)
