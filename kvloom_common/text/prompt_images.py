"""Images in prompts: the tokens that stand for them, and where they stand.

An image is a run of token ids from 2**31 on, which no vocabulary has. They follow from its content, so that whatever
depends on the tokens of a prompt depends on its images as well: cached blocks, the choice of a shard, results that are
kept, receipts. An engine with the capability "vision" gets the content beside them."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from kvloom.errors import invalid_argument
from kvloom.text.token_ids import BYTES_PER_ID, pack_token_ids, token_array, unpack_token_ids
from kvloom.v1.generation_pb2 import ImageTokens, PromptImage

FIRST_IMAGE_ID: Final = 2**31
MAX_IMAGES: Final = 64
MAX_IMAGE_BYTES: Final = 8 * 2**20
"""The limit for all images of a prompt together: they travel with it to the shard, and again when it moves."""
SHOWN: Final = "[image]"
"""Stands for an image where the text of a prompt is screened."""
_MARK_CHARS: Final = 24
_LETTERS: Final = str.maketrans("0123456789", "qrstuvwxyz")
"""Rules that look for numbers find none in a mark."""
_SECRET: Final = secrets.token_bytes(32)
_FIELD: Final = "images"


ImageMarks = Mapping[int, str]
"""Maps the ids of parts that are images to the marks that stand for them in texts (PromptImages)."""
NO_MARKS: Final[ImageMarks] = {}


def image_token_ids(content: bytes, num_tokens: int) -> array[int]:
    """The tokens that stand for an image. Takes about a millisecond for each megabyte."""
    digest = hashlib.shake_256(hashlib.sha256(content).digest()).digest(BYTES_PER_ID * num_tokens)
    return token_array(FIRST_IMAGE_ID | token_id for token_id in unpack_token_ids(digest))


def num_image_tokens(rule: ImageTokens, width: int, height: int) -> int:
    """How many tokens stand for an image of so many pixels."""
    patches = math.ceil(width / rule.patch_pixels) * math.ceil(height / rule.patch_pixels)
    return min(patches, rule.max_tokens)


def words_of(token_ids: Sequence[int], images: Iterable[PlacedImage], *, is_trusted: bool) -> Sequence[int]:
    """The tokens of a prompt that stand for no image. Unless `is_trusted`, it is checked that the others follow from
    the images' contents. Raises KvloomError (INVALID_ARGUMENT)."""
    words, end, num_bytes = token_array(), 0, 0
    for number, image in enumerate(images):
        at = f"{_FIELD}[{number}]"
        num_bytes += len(image.data)
        if number >= MAX_IMAGES or num_bytes > MAX_IMAGE_BYTES:
            raise invalid_argument(
                f"{at}: a prompt has at most {MAX_IMAGES} images, of {MAX_IMAGE_BYTES} bytes together.", at
            )
        first, after = image.position, image.position + image.num_tokens
        if not image.num_tokens or first < end or after > len(token_ids):
            raise invalid_argument(f"{at}.position: its tokens are not in the prompt, or in another image.", at)
        own = token_ids[first:after]
        if min(own) < FIRST_IMAGE_ID or (
            not is_trusted and token_array(own) != image_token_ids(image.data, image.num_tokens)
        ):
            raise invalid_argument(f"{at}: its tokens do not follow from its content.", at)
        words.extend(token_ids[end:first])
        end = after
    words.extend(token_ids[end:])
    return words


class PlacedImage(Protocol):
    """An image in a prompt: a PromptImage, or what an engine gets of one."""

    @property
    def position(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def data(self) -> bytes: ...


class PromptImages:
    """The images of one conversation, while it becomes a prompt: a mark stands for each in a message's text. It follows
    from the image and a secret of this process, so that who writes a message does not know it."""

    def __init__(self) -> None:
        self._by_mark: dict[str, tuple[PromptImage, array[int]]] = {}
        self.placed: list[PromptImage] = []
        """Those of the prompt that was joined last, in order."""

    @property
    def num_tokens(self) -> int:
        """Those of all images that were added, each counted once."""
        return sum(len(token_ids) for _, token_ids in self._by_mark.values())

    def add(self, media_type: str, content: bytes, token_ids: array[int]) -> str:
        """Returns the mark that stands for it."""
        digest = hmac.new(_SECRET, pack_token_ids(token_ids), hashlib.sha256).hexdigest()[:_MARK_CHARS]
        mark = f"\ufdd0{digest.translate(_LETTERS)}\ufdd1"
        image = PromptImage(num_tokens=len(token_ids), media_type=media_type, data=content)
        self._by_mark[mark] = image, token_ids
        return mark

    def split(self, text: str) -> tuple[list[str], list[str]]:
        """The texts between the marks, and the marks."""
        parts = re.split(f"({'|'.join(self._by_mark)})", text)
        return parts[::2], parts[1::2]

    def joined(self, texts: Sequence[Sequence[int]], marks: Sequence[str]) -> array[int]:
        """The tokens of a prompt, of those of the texts between its images."""
        token_ids = token_array(texts[0])
        self.placed = []
        for mark, text in zip(marks, texts[1:], strict=True):
            image, own = self._by_mark[mark]
            placed = PromptImage(position=len(token_ids))
            placed.MergeFrom(image)
            self.placed.append(placed)
            token_ids.extend(own)
            token_ids.extend(text)
        return token_ids

    def without_marks(self, text: str) -> str:
        """The text of a prompt as it is screened."""
        return SHOWN.join(self.split(text)[0])
