"""The wire format of local streams (kvloom/transport/local_stream.py).

A frame consists of its size (4 bytes, little-endian), its kind (1 byte), and its payload: a serialized message, or a
google.rpc.Status at the end of the stream. The payload of PING and PONG is empty.
"""

from __future__ import annotations

import struct
from typing import Final

import grpc
from google.rpc import status_pb2

MAX_MESSAGE_BYTES: Final = 64 * 2**20

HEAD: Final = struct.Struct("<IB")
MESSAGE: Final = 0
PING: Final = 1
PONG: Final = 2
END: Final = 3

STATUS_DETAILS: Final = "grpc-status-details-bin"
_STATUS_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


def is_whole(unparsed: bytearray) -> bool:
    """True when the first frame is complete, or is larger than allowed."""
    if len(unparsed) < HEAD.size:
        return False
    length, _ = HEAD.unpack_from(unparsed)
    return length > MAX_MESSAGE_BYTES or len(unparsed) >= HEAD.size + length


def status_of(code: grpc.StatusCode, message: str) -> status_pb2.Status:
    return status_pb2.Status(code=code.value[0], message=message)


def unavailable(message: str) -> status_pb2.Status:
    return status_of(grpc.StatusCode.UNAVAILABLE, message)


def error_of(status: status_pb2.Status) -> grpc.aio.AioRpcError:
    """The error that gRPC raises when a stream has ended with this status. A stream that has ended cleanly is
    UNAVAILABLE for further reads and writes."""
    if not status.code:
        status = unavailable("The stream has ended.")
    trailers = grpc.aio.Metadata()
    if status.details:
        trailers.add(STATUS_DETAILS, status.SerializeToString())
    code = _STATUS_CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details=status.message)
