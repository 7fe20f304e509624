"""How far the events of one response may be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from edge_http.resume.commit_gate import CommitGate, Committed


class _Publication(Committed, Protocol):
    fresh: list[bytes]
    """Prefix and payload of the latest events."""


class CommitCursor:
    """The events of one response between its log and its live reader: those behind `num_released` are held until the
    commit gate releases them."""

    __slots__ = ("_gate", "_has_begun", "_held", "_publication", "is_shown", "num_released")

    def __init__(self, gate: CommitGate[Any], publication: _Publication) -> None:
        self._gate = gate
        self._publication = publication
        self._held: list[bytes] = []
        """The last events of the log, which the live reader has to wait for; empty without a live reader."""
        self._has_begun = False
        self.is_shown = False
        """Clients may know that there is an answer."""
        self.num_released = publication.num_published
        """The number of the last event that may be shown."""
        self._note()

    @property
    def has_held_events(self) -> bool:
        return bool(self._held)

    def begin(self) -> bool:
        """The answer has begun. Returns whether that may be shown yet."""
        self._has_begun = True
        self.is_shown = self._note()
        return self.is_shown

    def add(self, number: int, prefix: bytes, payload: bytes, event: bytes, has_live_reader: bool) -> bool:
        """Event `number` was appended to the log. Returns whether it is held back from the live reader."""
        publication, gate = self._publication, self._gate
        if not publication.is_noted:
            gate.note(publication)
        if gate.holds:
            publication.fresh += (prefix, payload)
            if has_live_reader:
                self._held.append(event)
            return has_live_reader
        if self._held:  # of a stream that was taken over from another edge and is not in the journal yet
            self._held.append(event)
            return True
        self.num_released = number
        return False

    def end(self) -> bool:
        """The answer has ended. Returns whether that may be shown yet."""
        return self._note() and not self._held

    def hold(self, events: Sequence[bytes]) -> None:
        """Replace the held events by those that a new live reader has to wait for."""
        self._held = list(events)

    def release(self, up_to: int, num_events: int) -> list[bytes]:
        """Events up to that number, of `num_events`, may be shown. Returns those that were held."""
        self.is_shown = self._has_begun
        if up_to > self.num_released:
            self.num_released = up_to
        held = self._held
        if self.num_released >= num_events:
            self._held = []
            return held
        num_shown = max(0, self.num_released - num_events + len(held))
        self._held = held[num_shown:]
        return held[:num_shown]

    def _note(self) -> bool:
        """Something has happened that the journal does not have. Returns whether it may be shown nevertheless."""
        if not self._publication.is_noted:
            self._gate.note(self._publication)
        return not self._gate.holds
