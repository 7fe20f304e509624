"""How clients connect to routers over gRPC."""

from __future__ import annotations

from typing import Final

MAX_MESSAGE_BYTES: Final = 64 * 2**20
CHANNEL_OPTIONS: Final = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Without this, channels to one address share a connection, and one stalled stream could stall another process's.
    ("grpc.use_local_subchannel_pool", 1),
    # So long a router has to say something to a new connection; without it, 20 seconds. Of several that share a port
    # one may hang, and only the next try may come to another. Later tries wait longer, up to the second.
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Find out that the other machine is gone without a word, or that its process hangs.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # What a ping really waits for; without it, a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]
