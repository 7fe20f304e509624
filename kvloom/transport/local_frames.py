"""What is on the wire of a local stream (kvloom/transport/local_stream.py).

A frame is its size (4 bytes, little-endian), its kind (1 byte), and its bytes: a serialized message, or for the end of
the stream a google.rpc.Status. Pings and their answers have none.
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
    """The first frame is all there, or too large to ever be."""
    if len(unparsed) < HEAD.size:
        return False
    length, _ = HEAD.unpack_from(unparsed)
    return length > MAX_MESSAGE_BYTES or len(unparsed) >= HEAD.size + length


def status_of(code: grpc.StatusCode, message: str) -> status_pb2.Status:
    return status_pb2.Status(code=code.value[0], message=message)


def unavailable(message: str) -> status_pb2.Status:
    return status_of(grpc.StatusCode.UNAVAILABLE, message)


def error_of(status: status_pb2.Status) -> grpc.aio.AioRpcError:
    """As gRPC raises it when a stream has ended like that; one in good order is UNAVAILABLE to who wants more of it."""
    if not status.code:
        status = unavailable("the stream has ended")
    trailers = grpc.aio.Metadata()
    if status.details:
        trailers.add(STATUS_DETAILS, status.SerializeToString())
    code = _STATUS_CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details=status.message)
