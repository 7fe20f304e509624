"""How a request ended, in one word, and what happened to it on its way: the same in usage records, logs, metrics and
explanations."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from kvloom.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_ERROR,
    FinishReason,
)


class RequestEnd(enum.StrEnum):
    FINISHED = "finished"
    """The model or a limit of tokens ended it."""
    CANCELLED = "cancelled"
    HALTED = "halted"
    """The safety policy stopped it."""
    FAILED = "failed"
    EVICTED = "evicted"
    """It was admitted, and left the queue with an error before it was sent to a shard: it gave its place to another
    request, waited too long, or lost its model."""
    REJECTED = "rejected"
    """It was never admitted."""


class RelocationCounts(msgspec.Struct, frozen=True):
    """How often one of a request's sequences continued on another shard, by cause."""

    num_preemptions: int = 0
    """It left its shard so that another tenant was served."""
    num_migrations: int = 0
    """It was taken off a shard that was suspected, drained or handed over its work."""
    num_failovers: int = 0
    """Its shard, or its engine, had failed."""
    num_notice_migrations: int = 0
    """Those of the migrations for which the shard had notice that it ends."""
    is_exact: bool = True
    """True when its tokens are those that there would have been without the moves."""
    moved_seconds: float = 0.0
    """How long its sequences waited for a shard again, after they had to leave one."""

    @property
    def words(self) -> list[str]:
        """Returns what has happened to the request, one word for each kind."""
        counts = {
            "preempted": self.num_preemptions,
            "migrated": self.num_migrations,
            "failed_over": self.num_failovers,
        }
        return [word for word, count in counts.items() if count]

    def with_preemption(self) -> RelocationCounts:
        return msgspec.structs.replace(self, num_preemptions=self.num_preemptions + 1)

    def with_migration(self, *, is_noticed: bool = False) -> RelocationCounts:
        return msgspec.structs.replace(
            self,
            num_migrations=self.num_migrations + 1,
            num_notice_migrations=self.num_notice_migrations + is_noticed,
        )

    def with_failover(self) -> RelocationCounts:
        return msgspec.structs.replace(self, num_failovers=self.num_failovers + 1)

    def after_wait(self, seconds: float) -> RelocationCounts:
        return msgspec.structs.replace(self, moved_seconds=self.moved_seconds + seconds)

    def resampled(self) -> RelocationCounts:
        return msgspec.structs.replace(self, is_exact=False)


NO_MOVES: Final = RelocationCounts()
_ENDS: Final[dict[int, RequestEnd]] = {
    FINISH_REASON_CANCELLED: RequestEnd.CANCELLED,
    FINISH_REASON_CONTENT_FILTER: RequestEnd.HALTED,
}


def end_of(reason: FinishReason.ValueType, *, is_admitted: bool, was_sent: bool) -> RequestEnd:
    """`was_sent`: to a shard."""
    if reason != FINISH_REASON_ERROR:
        return _ENDS.get(reason, RequestEnd.FINISHED)
    if not is_admitted:
        return RequestEnd.REJECTED
    return RequestEnd.FAILED if was_sent else RequestEnd.EVICTED
