"""Small pictures."""

from __future__ import annotations

import base64
import struct
import zlib


def png(width: int = 60, height: int = 30, shade: int = 0) -> bytes:
    """One of this size, all of it in one shade of grey."""
    rows = (b"\0" + bytes([shade]) * width) * height
    return png_of(width, height, zlib.compress(rows))


def png_of(width: int, height: int, data: bytes) -> bytes:
    """One that says that it has this size, with this content."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
