"""gRPC channels to routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import grpc.aio

MAX_MESSAGE_BYTES: Final = 64 * 2**20
CHANNEL_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Without this, channels to one address share a connection, and one stalled stream could stall another process's.
    ("grpc.use_local_subchannel_pool", 1),
    # A router must answer a new connection within this time; gRPC's default is 20 seconds. If one of several routers on
    # a port hangs, only the next try can reach another one. Later tries wait longer, up to the second value.
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Detect that the other machine has vanished without closing the connection, or that its process hangs.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # This is the time for which a ping really waits; the default is a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]

OpenChannel = Callable[[str], grpc.aio.Channel]
"""Opens a channel to the router at host:port."""


def open_plain_channel(address: str) -> grpc.aio.Channel:
    """Without TLS."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
