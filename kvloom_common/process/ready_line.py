"""The lines by which a process tells its parent how it is. They stand apart from service.py, because the parent needs
no gRPC for them.
"""

from __future__ import annotations

from typing import Final

import msgspec

LEAVING_LINE: Final = b'{"event":"leaving"}'
END_LINE: Final = b'{"event":"end"}'


class ReadyLine(msgspec.Struct):
    """Printed once on stdout, as one line of JSON, when a process starts to serve."""

    address: str
    metrics_address: str = ""
    router_address: str = ""
    """The address of the router in this process, if there is one."""
    router_metrics_address: str = ""
    internal_address: str = ""
    """Where the router in this process serves the processes of its fabric, if there is one."""
    peer_address: str = ""
    """Where the edge in this process serves the processes of its fabric, if there is one and the fabric has a
    secret."""
    engine: str = ""
    """The engine that computes in this process, and how fast, if it is a shard."""
    variant: str = ""
    """See ShardInfo.variant in shard_service.proto."""
    event: str = "ready"
