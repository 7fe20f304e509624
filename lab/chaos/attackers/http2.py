"""HTTP/2 frames as the attackers write them: by hand, because a client library would refuse to send most of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
SETTINGS_ACK: Final = b"\x00\x00\x00\x04\x01\x00\x00\x00\x00"
PING: Final = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"\x00" * 8
_DATA, _HEADERS, _RST_STREAM = 0, 1, 3
_END_STREAM, _END_HEADERS = 1, 4
_MAX_FRAME_BYTES: Final = 16_384
_CANCEL: Final = 8


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def call_headers(stream: int, method: str, *, host: str, encoding: str = "", authorization: str = "") -> bytes:
    """The headers of a gRPC call of RouterService."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/kvloom.v1.RouterService/{method}"),
        (":authority", host),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    if encoding:
        fields.append(("grpc-encoding", encoding))
    if authorization:
        fields.append(("authorization", authorization))
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)
    return frame(_HEADERS, _END_HEADERS, stream, block)


def call_message(stream: int, message: bytes, *, compressed: bool = False) -> Iterator[bytes]:
    """The DATA frames of one message, the last of its call."""
    rest = struct.pack(">?I", compressed, len(message)) + message
    while True:
        piece, rest = rest[:_MAX_FRAME_BYTES], rest[_MAX_FRAME_BYTES:]
        yield frame(_DATA, 0 if rest else _END_STREAM, stream, piece)
        if not rest:
            return


def reset(stream: int) -> bytes:
    return frame(_RST_STREAM, 0, stream, struct.pack(">I", _CANCEL))


def _text(value: str) -> bytes:
    """A literal of HPACK without Huffman coding."""
    raw = value.encode()
    if len(raw) < 127:
        return bytes((len(raw),)) + raw
    rest, length = len(raw) - 127, b"\x7f"
    while rest >= 128:
        length += bytes((rest % 128 + 128,))
        rest //= 128
    return length + bytes((rest,)) + raw
