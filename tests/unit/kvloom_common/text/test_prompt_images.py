"""The tokens that stand for images in prompts."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import ImageTokens, PromptImage
from kvloom_common.text.prompt_images import (
    FIRST_IMAGE_ID,
    MAX_IMAGE_BYTES,
    MAX_IMAGES,
    PromptImages,
    image_token_ids,
    num_image_tokens,
    words_of,
)


def image(position: int, data: bytes = b"a", num_tokens: int = 2) -> PromptImage:
    return PromptImage(position=position, num_tokens=num_tokens, data=data)


def test_tokens_follow_from_the_content_as_the_proto_says() -> None:
    """A client in any language makes the same ones, and none is a token of a vocabulary."""
    made = image_token_ids(b"picture", 300)
    digest = hashlib.shake_256(hashlib.sha256(b"picture").digest()).digest(4)
    assert made[0] == int.from_bytes(digest, "little") | 2**31
    assert min(made) >= FIRST_IMAGE_ID
    assert image_token_ids(b"picture", 10) == made[:10]
    assert image_token_ids(b"another", 10) != made[:10]


def test_patches_are_counted_and_bounded() -> None:
    """One that is not whole counts, too."""
    rule = ImageTokens(patch_pixels=28, max_tokens=64)
    assert [num_image_tokens(rule, *size) for size in ((1, 1), (28, 28), (29, 28), (10_000, 10_000))] == [1, 1, 2, 64]


def prompt(*parts: Sequence[int]) -> array[int]:
    return array("I", [token for part in parts for token in part])


def test_words_are_what_stands_for_no_image() -> None:
    """Checks of vocabularies, and the text that is screened, are about these."""
    first, second = image_token_ids(b"a", 2), image_token_ids(b"b", 3)
    tokens = prompt([1, 2], first, [3], second)
    images = [image(2), image(5, b"b", 3)]
    assert list(words_of(tokens, images, is_trusted=False)) == [1, 2, 3]


BAD: dict[str, tuple[Sequence[int], list[PromptImage]]] = {
    "another content": (prompt([1], image_token_ids(b"b", 2)), [image(1)]),
    "words": ([1, 2, 3], [image(1)]),
    "beyond the end": (prompt([1], image_token_ids(b"a", 2)), [image(2)]),
    "no tokens": ([1, 2], [image(0, num_tokens=0)]),
    "overlapping": (prompt(image_token_ids(b"a", 3)), [image(0), image(1)]),
    "too many": (prompt([1]), [image(0, num_tokens=0)] * (MAX_IMAGES + 1)),
    "too large": (prompt(image_token_ids(b"a", 2)), [image(0, bytes(MAX_IMAGE_BYTES + 1))]),
}


@pytest.mark.parametrize(("tokens", "images"), BAD.values(), ids=BAD)
def test_tokens_that_are_not_the_images_are_refused(tokens: Sequence[int], images: list[PromptImage]) -> None:
    """A client outside the fabric could else find cached blocks of an image that it does not have."""
    with pytest.raises(KvloomError) as caught:
        words_of(tokens, images, is_trusted=False)
    assert caught.value.field.startswith("images[")


def test_marks_become_tokens_and_are_not_screened() -> None:
    """The same image twice is two images; text that only looks like a mark stays text."""
    images = PromptImages()
    first = images.add("image/png", b"a", image_token_ids(b"a", 2))
    second = images.add("image/png", b"b", image_token_ids(b"b", 1))
    fake = "\ufdd0" + "a" * 24 + "\ufdd1"
    text = f"see {first}{second} and {first} {fake}"
    texts, marks = images.split(text)
    assert (texts, marks) == (["see ", "", " and ", f" {fake}"], [first, second, first])
    joined = images.joined([[1], [], [2], [3]], marks)
    assert [(one.position, one.num_tokens, one.data) for one in images.placed] == [
        (1, 2, b"a"),
        (3, 1, b"b"),
        (5, 2, b"a"),
    ]
    assert list(words_of(joined, images.placed, is_trusted=False)) == [1, 2, 3]
    assert images.without_marks(text) == f"see [image][image] and [image] {fake}"
