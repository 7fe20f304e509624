"""What each shard has to do: its own last report, plus what this router sent there that the report cannot know yet.

A load view that is seconds old costs little as long as the router's own placements since then are added.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from router.core.events import ShardLoad

REPORT_LAG_SECONDS: Final = 0.005
"""A placement this young may have been on its way while the shard wrote its report."""

ReservationKey = tuple[str, int]
"""(request_id, attempt_id): what one dispatch reserves can only be released by the same dispatch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    shard_id: str
    num_sequences: int
    num_prefill_tokens: int
    num_blocks: int
    placed_at: float


@dataclasses.dataclass(slots=True)
class LoadView:
    """A shard's load as far as the router can tell now."""

    report: ShardLoad = dataclasses.field(default_factory=ShardLoad)
    num_unreported_sequences: int = 0
    num_unreported_prefill_tokens: int = 0
    num_unreported_blocks: int = 0
    num_reserved_sequences: int = 0
    """Of this router, dispatched and not released."""
    unreported: dict[ReservationKey, Reservation] = dataclasses.field(default_factory=dict)
    """In the order of placement."""

    @property
    def num_waiting(self) -> int:
        return self.report.num_waiting + self.num_unreported_sequences

    @property
    def num_queued_prefill_tokens(self) -> int:
        return self.report.num_queued_prefill_tokens + self.num_unreported_prefill_tokens


class LoadLedger:
    """Reservations are made by a dispatch, and released exactly once: KeyError says that a caller broke that."""

    def __init__(self) -> None:
        self._views: dict[str, LoadView] = {}
        self._reservations: dict[ReservationKey, Reservation] = {}

    def add_shard(self, shard_id: str) -> None:
        assert shard_id not in self._views
        self._views[shard_id] = LoadView()

    def remove_shard(self, shard_id: str) -> None:
        """Everything that was reserved there must have been released."""
        view = self._views.pop(shard_id)
        assert not view.num_reserved_sequences
        assert not view.unreported

    def view(self, shard_id: str) -> LoadView:
        return self._views[shard_id]

    def report(self, shard_id: str, load: ShardLoad, now: float) -> None:
        """The shard's own word, which counts everything that had reached it."""
        view = self._views[shard_id]
        view.report = load
        for key in list(view.unreported):
            if view.unreported[key].placed_at > now - REPORT_LAG_SECONDS:
                break
            self._drop_unreported(view, key)

    def reserve(self, key: ReservationKey, reservation: Reservation) -> None:
        if key in self._reservations:
            raise KeyError(key)
        view = self._views[reservation.shard_id]
        self._reservations[key] = reservation
        view.num_reserved_sequences += reservation.num_sequences
        view.unreported[key] = reservation
        view.num_unreported_sequences += reservation.num_sequences
        view.num_unreported_prefill_tokens += reservation.num_prefill_tokens
        view.num_unreported_blocks += reservation.num_blocks

    def note_start(self, key: ReservationKey) -> None:
        """Its first token is there: nothing of it is queued any more."""
        reservation = self._reservations.get(key)
        if reservation is not None:
            self._drop_unreported(self._views[reservation.shard_id], key)

    def release(self, key: ReservationKey) -> None:
        reservation = self._reservations.pop(key)
        view = self._views[reservation.shard_id]
        view.num_reserved_sequences -= reservation.num_sequences
        self._drop_unreported(view, key)

    def keys(self) -> set[ReservationKey]:
        """Of all reservations that are held."""
        return set(self._reservations)

    def check_integrity(self) -> None:
        """Assert that every sum is the sum of its parts and that nothing is negative."""
        for shard_id, view in self._views.items():
            reserved = [r for r in self._reservations.values() if r.shard_id == shard_id]
            unreported = view.unreported.values()
            assert view.unreported.keys() <= self._reservations.keys()
            assert view.num_reserved_sequences == sum(r.num_sequences for r in reserved)
            assert view.num_unreported_sequences == sum(r.num_sequences for r in unreported)
            assert view.num_unreported_prefill_tokens == sum(r.num_prefill_tokens for r in unreported)
            assert view.num_unreported_blocks == sum(r.num_blocks for r in unreported)
            assert min(view.num_waiting, view.num_queued_prefill_tokens, view.num_reserved_sequences) >= 0

    def _drop_unreported(self, view: LoadView, key: ReservationKey) -> None:
        reservation = view.unreported.pop(key, None)
        if reservation is None:
            return
        view.num_unreported_sequences -= reservation.num_sequences
        view.num_unreported_prefill_tokens -= reservation.num_prefill_tokens
        view.num_unreported_blocks -= reservation.num_blocks
