"""Checks images that clients send, without decoding them: the heads of files say what they are, and how large they will
be. An image that would fill the memory of who decodes it is refused by its size in pixels."""

from __future__ import annotations

import io
from typing import Final

import imagesize

MAX_SIDE: Final = 16_384
MAX_PIXELS: Final = 36_000_000
HEAD_BYTES: Final = 512 * 2**10
"""The size stands within the first bytes of a file, behind thumbnails and profiles. Reading more would take seconds."""
_BEGINNINGS: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
_WEBP: Final = (b"RIFF", b"WEBP")


class ImageError(Exception):
    """It is no image that a model could see. The message ends a sentence about it."""


def size_of(content: bytes) -> tuple[str, int, int]:
    """The type, width and height of a PNG, JPEG, WebP or GIF. Raises ImageError."""
    kind = next((kind for beginning, kind in _BEGINNINGS if content.startswith(beginning)), "")
    if (content[:4], content[8:12]) == _WEBP:
        kind = "image/webp"
    if not kind:
        raise ImageError("is not a PNG, JPEG, WebP or GIF")
    try:
        width, height = imagesize.get(io.BytesIO(content[:HEAD_BYTES]))
    except Exception as error:  # whatever a parser of broken heads runs into
        raise ImageError("is damaged") from error
    if width < 1 or height < 1:
        raise ImageError("is damaged")
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise ImageError(f"has {width} x {height} pixels; at most {MAX_SIDE} a side, and {MAX_PIXELS} in all")
    return kind, width, height
