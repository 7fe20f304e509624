"""The memory of one kind of content, bounded for the whole process, with a share for each caller."""

from __future__ import annotations

from typing import Final

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.limits.address_limit import KeyedCounts

RETRY_SECONDS: Final = 2.0
MEMORY_RETRY_SECONDS: Final = 5.0
CALLER_SHARE: Final = 0.5
"""The part of a budget that one caller may use. The others have the rest. Callers that share one name, "", have no
share."""


def memory_error() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_OVERLOADED,
        "This server is short of memory, and takes no large requests at the moment.",
        retry_after_seconds=MEMORY_RETRY_SECONDS,
    )


class ByteBudget:
    """Limits the bytes that are held at a time. Bytes count when they arrive, so that a client that announces much and
    sends little does not use up the budget."""

    def __init__(self, max_bytes: int, content: str, *, least_share_bytes: int = 0, ends_large: bool = False) -> None:
        """`content` is what errors call it, e.g. "request bodies". A caller's share is at least `least_share_bytes`.
        `ends_large`: whether leases that are large already may not grow either while memory is short."""
        self._max_bytes = max_bytes
        self._max_bytes_per_caller = max(round(max_bytes * CALLER_SHARE), min(least_share_bytes, max_bytes))
        self._content = content
        self._ends_large = ends_large
        self._max_lease_bytes: int | None = None
        """The most that a lease may have while memory is short; None: it is not."""
        self.num_bytes = 0
        self.num_leases = 0
        self._num_bytes_by_caller = KeyedCounts[str]()

    def restrict(self, max_lease_bytes: int | None) -> None:
        """Memory is short: leases may have no more than this until `restrict(None)`."""
        self._max_lease_bytes = max_lease_bytes

    def lease(self, caller: str) -> ByteLease:
        self.num_leases += 1
        return ByteLease(self, caller, self._max_lease_bytes)

    def lease_limit(self, at_its_start: int | None) -> int | None:
        """How many bytes a lease may have, which had the limit `at_its_start`."""
        return self._max_lease_bytes if self._ends_large else at_its_start

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
        self.reduce(caller, num_bytes)

    def reduce(self, caller: str, num_bytes: int) -> None:
        """A lease holds so much less."""
        if not num_bytes:
            return
        self.num_bytes -= num_bytes
        self._num_bytes_by_caller.remove(caller, num_bytes)


class ByteLease:
    """One request's part of a budget. The end of the `with` block releases it."""

    __slots__ = ("_budget", "_caller", "_max_bytes", "num_bytes")

    def __init__(self, budget: ByteBudget, caller: str, max_bytes: int | None = None) -> None:
        self._budget = budget
        self._caller = caller
        self._max_bytes = max_bytes
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
        limit = self._budget.lease_limit(self._max_bytes)
        if limit is not None and self.num_bytes + num_bytes > limit:
            raise memory_error()
        self._budget.take(self._caller, num_bytes)
        self.num_bytes += num_bytes

    def resize(self, num_bytes: int) -> None:
        """Hold exactly so much. Raises KvloomError (OVERLOADED, RATE_LIMITED)."""
        if num_bytes > self.num_bytes:
            self.take(num_bytes - self.num_bytes)
        elif num_bytes < self.num_bytes:
            self._budget.reduce(self._caller, self.num_bytes - num_bytes)
            self.num_bytes = num_bytes
