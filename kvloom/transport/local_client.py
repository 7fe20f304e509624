"""The client's side of local streams: see kvloom/transport/local_stream.py."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvloom.transport.local_socket import local_socket_name
from kvloom.transport.local_stream import LocalStream

In = TypeVar("In", bound=Message)


async def connect_local(address: str, in_type: type[In]) -> LocalStream[In, Any] | None:
    """A stream to the service at a gRPC address, if that is on this machine and listens on a local socket; None
    otherwise."""
    name = local_socket_name(address)
    if name is None:
        return None
    loop = asyncio.get_running_loop()
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    except OSError:  # too many open files
        return None
    try:
        connection.connect(name)  # succeeds or fails at once (uvloop does not accept abstract names)
        _, stream = await loop.create_unix_connection(lambda: LocalStream[In, Any](in_type), sock=connection)
    except OSError:
        connection.close()
        return None
    return None if stream.closed.done() else stream
