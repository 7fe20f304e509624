"""What the router's links to shards and to the safety service have in common: how they connect, break and try again."""

from __future__ import annotations

from typing import Final

import grpc

from kvloom.transport.channel_options import CHANNEL_OPTIONS

FIRST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 2.0
CONNECT_TIMEOUT_SECONDS: Final = 2.0
"""From the first packet to the peer's hello."""
LINK_OPTIONS: Final = list(
    {
        **dict(CHANNEL_OPTIONS),
        # Nobody shares its port (a safety service only with its successor): another try would come to the same peer.
        "grpc.min_reconnect_backoff_ms": int(1000 * CONNECT_TIMEOUT_SECONDS),
    }.items()
)


class LinkError(Exception):
    """This connection is of no use any more; the message says why."""


class Backoff:
    """Doubles from FIRST_SECONDS to `longest_seconds`; begins anew after a connection that stood for longer than
    LONGEST_SECONDS."""

    def __init__(self, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._longest_seconds = longest_seconds
        self._seconds = FIRST_SECONDS

    def next_seconds(self, stood_seconds: float) -> float:
        """The pause after an attempt that took, or a connection that stood for, `stood_seconds`."""
        seconds = FIRST_SECONDS if stood_seconds > LONGEST_SECONDS else self._seconds
        self._seconds = min(seconds * 2, self._longest_seconds)
        return seconds


def cause_of(error: BaseException) -> str:
    """For the log."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
