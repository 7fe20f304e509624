"""Images are judged by the heads of their files."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_http.wire.image_content import HEAD_BYTES, MAX_PIXELS, MAX_SIDE, ImageError, size_of
from tests.examples import num_examples
from tests.fakes.pictures import png, png_of

HEADS = (
    b"\x89PNG\r\n\x1a\n",
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
    b"\xff\xd8\xff",
    b"\xff\xd8\xff\xe0\x00\x00",
    b"\xff\xd8\xff\xc0\x00\x11\x08",
    b"GIF89a",
    b"RIFF\xff\xff\xff\xffWEBPVP8 ",
    b"RIFF\x00\x00\x00\x00WEBPVP8L",
    b"RIFF\x00\x00\x00\x00WEBPVP8X",
)


@settings(max_examples=num_examples(300))
@given(st.sampled_from(HEADS), st.binary(max_size=200))
def test_whatever_follows_a_head_is_an_image_or_none(head: bytes, rest: bytes) -> None:
    """A client writes what it likes: nothing but the one error is raised, and sizes are within the bounds."""
    with contextlib.suppress(ImageError):
        _, width, height = size_of(head + rest)
        assert 1 <= min(width, height) <= max(width, height) <= MAX_SIDE
        assert width * height <= MAX_PIXELS


def test_only_the_head_of_a_file_is_read() -> None:
    """Segments without a picture cost time for each: a file of nothing else must not be read to its end."""
    segment, picture = b"\xff\xe0\x00\x02", b"\xff\xc0\x00\x0b\x08\x00\x10\x00\x20\x01\x01\x11\x00"
    assert size_of(b"\xff\xd8" + segment * 100 + picture) == ("image/jpeg", 32, 16)
    with pytest.raises(ImageError):
        size_of(b"\xff\xd8" + segment * (HEAD_BYTES // len(segment)) + picture)


def test_nothing_is_decoded() -> None:
    """What a picture of 36 million pixels would be is not made: its size is in the first bytes."""
    assert size_of(png(60, 30)) == ("image/png", 60, 30)
    assert size_of(png_of(6000, 6000, b"")) == ("image/png", 6000, 6000)
