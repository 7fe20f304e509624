"""The router's links to shards and to the safety service share these: timeouts, backoff and errors."""

from __future__ import annotations

from typing import Final

import grpc

from kvloom.backoff import Backoff
from kvloom.transport.channel_options import CHANNEL_OPTIONS

FIRST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 2.0
CONNECT_TIMEOUT_SECONDS: Final = 2.0
"""The limit for connecting, from the first packet to the peer's hello."""
LINK_OPTIONS: Final = list(
    {
        **dict(CHANNEL_OPTIONS),
        # These peers share their port with no other process (a safety service only with its successor), so an earlier
        # reconnect would reach the same peer.
        "grpc.min_reconnect_backoff_ms": int(1000 * CONNECT_TIMEOUT_SECONDS),
    }.items()
)


class LinkError(Exception):
    """This connection cannot be used any more; the message gives the reason."""


def reconnect_backoff(max_seconds: float = LONGEST_SECONDS) -> Backoff:
    """Returns the pauses of one link. They start over after a connection that lasted for LONGEST_SECONDS."""
    return Backoff(FIRST_SECONDS, max_seconds, stable_seconds=LONGEST_SECONDS)


def cause_of(error: BaseException) -> str:
    """Describes the error for the log."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
