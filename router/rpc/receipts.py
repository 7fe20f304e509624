"""Counts the requests that are being received. Only their senders know how large they will be, so their number is
bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

GRACE_SECONDS: Final = 0.25
"""A message that needs less time than this is never ended: it is small, or its sender is fast."""


class MessageReceipt:
    """One message that is being received."""

    __slots__ = ("begun_at", "caller", "end")

    def __init__(self, caller: str, begun_at: float, end: Callable[[], None]) -> None:
        self.caller = caller
        self.begun_at = begun_at
        self.end = end
        """Ends it with an error."""


class Receipts:
    """The receipts of one process. If there are too many, the slowest of the caller who has most gives way: a sender
    that sends nothing then takes no place from others."""

    def __init__(self, max_receipts: int) -> None:
        self._max_receipts = max_receipts
        self._by_caller: dict[str, dict[MessageReceipt, None]] = {}
        """Each caller's, the oldest first."""
        self.num_receipts = 0

    def begin(self, caller: str, now: float, end: Callable[[], None]) -> MessageReceipt:
        """A message is received from now on."""
        if self.num_receipts >= self._max_receipts:
            largest = max(self._by_caller.values(), key=len)
            self._end_if_old(next(iter(largest)), now)
        receipt = MessageReceipt(caller, now, end)
        self._by_caller.setdefault(caller, {})[receipt] = None
        self.num_receipts += 1
        return receipt

    def finish(self, receipt: MessageReceipt) -> None:
        """The message has arrived. Nothing happens if the receipt has been ended."""
        own = self._by_caller.get(receipt.caller, {})
        if receipt in own:
            del own[receipt]
            self.num_receipts -= 1
            if not own:
                del self._by_caller[receipt.caller]

    def end_old(self, now: float) -> None:
        """Memory is short: end all that take longer than small messages do."""
        for receipt in [receipt for own in self._by_caller.values() for receipt in own]:
            self._end_if_old(receipt, now)

    def _end_if_old(self, receipt: MessageReceipt, now: float) -> None:
        if now - receipt.begun_at >= GRACE_SECONDS:
            self.finish(receipt)
            receipt.end()
