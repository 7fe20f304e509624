"""The memory of one kind of content, bounded for the whole process, with a share for each caller."""

from __future__ import annotations

from typing import Final

from edge_http.wire.keyed_counts import KeyedCounts
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

RETRY_SECONDS: Final = 2.0
CALLER_SHARE: Final = 0.5
"""The part of a budget that one caller may use. The others have the rest. Callers that share one name, "", have no
share."""


class ByteBudget:
    """Limits the bytes that are held at a time. Bytes count when they arrive, so that a client that announces much and
    sends little does not use up the budget."""

    def __init__(self, max_bytes: int, content: str, *, least_share_bytes: int = 0) -> None:
        """`content` is what errors call it, e.g. "request bodies". A caller's share is at least `least_share_bytes`."""
        self._max_bytes = max_bytes
        self._max_bytes_per_caller = max(round(max_bytes * CALLER_SHARE), min(least_share_bytes, max_bytes))
        self._content = content
        self.num_bytes = 0
        self.num_leases = 0
        self._num_bytes_by_caller = KeyedCounts[str]()

    def lease(self, caller: str) -> ByteLease:
        self.num_leases += 1
        return ByteLease(self, caller)

    def take(self, caller: str, num_bytes: int) -> None:
        """Raises KvloomError (OVERLOADED, RATE_LIMITED)."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise KvloomError(
                ErrorReason.ERROR_REASON_OVERLOADED,
                f"This server holds too many bytes of {self._content}.",
                retry_after_seconds=RETRY_SECONDS,
            )
        if caller and self._num_bytes_by_caller[caller] + num_bytes > self._max_bytes_per_caller:
            raise KvloomError(
                ErrorReason.ERROR_REASON_RATE_LIMITED,
                f"You have too many bytes of {self._content} at this server at a time; "
                f"one caller may have {self._max_bytes_per_caller}.",
                retry_after_seconds=RETRY_SECONDS,
            )
        self.num_bytes += num_bytes
        self._num_bytes_by_caller.add(caller, num_bytes)

    def give_back(self, caller: str, num_bytes: int) -> None:
        """The end of a lease."""
        self.num_leases -= 1
        if not num_bytes:
            return
        self.num_bytes -= num_bytes
        self._num_bytes_by_caller.remove(caller, num_bytes)


class ByteLease:
    """One request's part of a budget. The end of the `with` block releases it."""

    __slots__ = ("_budget", "_caller", "num_bytes")

    def __init__(self, budget: ByteBudget, caller: str) -> None:
        self._budget = budget
        self._caller = caller
        self.num_bytes = 0

    def __enter__(self) -> ByteLease:
        return self

    def __exit__(self, *_fault: object) -> None:
        self.release()

    def release(self) -> None:
        """End the lease; to be called once, by those that use no `with` block."""
        self._budget.give_back(self._caller, self.num_bytes)

    def take(self, num_bytes: int) -> None:
        """Raises KvloomError (OVERLOADED, RATE_LIMITED)."""
        self._budget.take(self._caller, num_bytes)
        self.num_bytes += num_bytes
