"""Encoding JSON."""

from __future__ import annotations

from typing import Any, Final

import msgspec

Json = dict[str, Any]
Buffer = bytes | bytearray
encode_json: Final = msgspec.json.Encoder().encode


def string_of(content: Buffer) -> str:
    """The text whose JSON string has this content between its quotes."""
    return msgspec.json.decode(b'"%b"' % content, type=str)
