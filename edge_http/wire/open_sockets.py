"""The WebSockets that are open at an edge."""

from __future__ import annotations

from typing import Final, Protocol

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.limits.address_limit import KeyedCounts

MAX_PER_CALLER: Final = 256
"""WebSockets of one caller at an edge."""
RETRY_SECONDS: Final = 5.0


class OpenSocket(Protocol):
    """A WebSocket as its edge sees it."""

    def leave(self) -> None:
        """Close it when its answers have ended. Does not raise."""
        ...


class OpenSockets:
    """Counts WebSockets by caller, and ends them with the process. It lives on the event loop."""

    def __init__(self) -> None:
        self._sockets: dict[OpenSocket, str] = {}
        self._num_by_caller = KeyedCounts[str]()

    def check(self, caller: str) -> None:
        """Raises KvloomError (RATE_LIMITED) if this caller may have no further one."""
        if self._num_by_caller[caller] >= MAX_PER_CALLER:
            message = f"You have {MAX_PER_CALLER} WebSockets at this server, which is the most for one caller."
            raise KvloomError(ErrorReason.ERROR_REASON_RATE_LIMITED, message, retry_after_seconds=RETRY_SECONDS)

    def add(self, socket: OpenSocket, caller: str) -> None:
        self._sockets[socket] = caller
        self._num_by_caller.add(caller)

    def remove(self, socket: OpenSocket) -> None:
        self._num_by_caller.remove(self._sockets.pop(socket))

    def leave(self) -> None:
        """Close all of them when their answers have ended: their clients come back to another edge."""
        for socket in tuple(self._sockets):
            socket.leave()
