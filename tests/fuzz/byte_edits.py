"""Texts and files that are mutated byte by byte. An edit is [position, number of bytes removed, bytes inserted]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from hypothesis import strategies as st

from tests.fuzz.target import bytes_of, text_of

INTERESTING: Final = (
    *("\x00", "\xff", "\x7f", "\x80", "\n", "\r\n", " ", '"', "{", "[", "<", "%", "\\", "-1", "1e999", "NaN"),
    *("\xff\xff\xff\xff", "\xff\xff\xff\xff\xff\xff\xff\xff", "\x00\x00\x00\x00\x00\x00\x00\x10", "\x00\x00\x00\x80"),
    *("\xed\xa0\x80", "\xf0\x9f\x99\x82", "\xe2\x96\x81", "[" * 3000, "9" * 5000),
)
"""Bytes at which decoders have broken."""

PIECES = st.sampled_from(INTERESTING) | st.binary(max_size=4).map(text_of)
EDITS = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 8), PIECES).map(list), max_size=4)


def edited(raw: bytes, edits: Sequence[Sequence[Any]]) -> bytes:
    """Positions beyond the end wrap around, so that every edit has an effect on every text."""
    for at, num_removed, inserted in edits:
        start = at % (len(raw) + 1)
        raw = raw[:start] + bytes_of(inserted) + raw[start + num_removed :]
    return raw
