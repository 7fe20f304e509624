"""Images that a request shows to a model with the capability "vision": marks stand for them in the conversation until
it becomes a prompt. For a model without it nothing is read; what it is asked about an image is refused by name, and
images of the history are left out with a note."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import web

from edge_http.anthropic.blocks import ImageBlock
from edge_http.anthropic.requests import MessagesTurn
from edge_http.edge import Edge
from edge_http.endpoints.file_inputs import naming
from edge_http.endpoints.input_parts import FoundPart, ItemParts, blocks_with_source, chat_parts
from edge_http.endpoints.ownership import owner_of
from edge_http.fetching import UrlFetcher
from edge_http.openai.requests import Message
from edge_http.wire.image_content import ImageError, size_of
from kvloom.errors import KvloomError, invalid_argument, unsupported
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import ImageTokens
from kvloom_common.models.served_model import ServedModel
from kvloom_common.text.prompt_images import (
    MAX_IMAGE_BYTES,
    MAX_IMAGES,
    ImageMarks,
    PromptImages,
    image_token_ids,
    num_image_tokens,
)

_ITEM_KINDS: Final = ("input_image", "computer_screenshot")
_DATA: Final = "data:"


class ImageInput(NamedTuple):
    """An image, and where it stands."""

    part: Any
    at: str
    is_asked: bool
    """It is of the message by which the new turn asks for something."""
    url: Any = None
    """A data: URL, or one to fetch."""
    file_id: Any = None


class SeenImages(NamedTuple):
    """The images of a conversation, and what stands for them in its texts."""

    images: PromptImages
    marks: ImageMarks


def image_rule(edge: Edge, model: ServedModel) -> ImageTokens | None:
    """How many tokens stand for an image; None for a model that sees none."""
    info = edge.models.info(model.name)
    return info.image_tokens if info is not None and info.HasField("image_tokens") else None


async def see_chat_images(
    edge: Edge, request: web.BaseRequest, messages: Sequence[Message], model: ServedModel
) -> SeenImages | None:
    """Read the images of a chat. Returns None if there is none, or the model sees none. Raises KvloomError that names
    the field."""
    rule = image_rule(edge, model)
    return None if rule is None else await _seen(edge, request, list(_chat_images(messages)), rule)


async def see_blocks(
    edge: Edge, request: web.BaseRequest, messages: Sequence[MessagesTurn], model: ServedModel
) -> SeenImages | None:
    """Read the images of a request to Messages. Returns None if there is none, or the model sees none. Raises
    KvloomError that names the field."""
    rule = image_rule(edge, model)
    return None if rule is None else await _seen(edge, request, list(_block_images(messages)), rule)


async def see_item_images(
    edge: Edge,
    request: web.BaseRequest,
    earlier: Sequence[msgspec.Raw],
    given: str | Sequence[msgspec.Raw],
    num_left_out: int,
    model: ServedModel,
) -> tuple[Sequence[msgspec.Raw], str | Sequence[msgspec.Raw], PromptImages | None]:
    """Returns the items with marks for images, and the images. `num_left_out`: how many of the caller's items come
    before those given. Raises KvloomError that names the field."""
    rule = image_rule(edge, model)
    if rule is None:
        return earlier, given, None
    items = ItemParts(earlier, given, _ITEM_KINDS, num_left_out)
    seen = await _seen(edge, request, _item_images(items.parts), rule)
    if seen is None:
        return earlier, given, None
    for part, _, _ in items.parts:
        if mark := seen.marks.get(id(part)):
            part.clear()
            part.update(type="input_text", text=mark)
    return *items.encoded(), seen.images


async def inline_item_images(
    edge: Edge,
    request: web.BaseRequest,
    earlier: list[msgspec.Raw],
    given: str | list[msgspec.Raw],
    model: ServedModel,
) -> tuple[list[msgspec.Raw], str | list[msgspec.Raw]]:
    """The items with the contents of their images, which are there no longer, or are others, when a background response
    is generated. Raises KvloomError that names the field."""
    if image_rule(edge, model) is None:
        return earlier, given
    items = ItemParts(earlier, given, _ITEM_KINDS)
    if not items.parts:
        return earlier, given
    most, fetcher = edge.config.max_body_bytes // 2, edge.fetcher.of_request()
    for number, one in enumerate(reversed(_item_images(items.parts))):  # as they are seen
        with naming(one.at, is_asked=one.is_asked):
            _check_number(number, one)
            content = await _content_of(edge, request, one, most, fetcher)
            url = f"{_DATA}{(await _checked(one, content))[0]};base64,{base64.b64encode(content).decode()}"
            one.part.update(image_url=url, file_id=None)
            most -= len(url)
    return items.encoded()


def _item_images(parts: Sequence[FoundPart]) -> list[ImageInput]:
    return [ImageInput(*found, found.part.get("image_url"), found.part.get("file_id")) for found in parts]


def _chat_images(messages: Sequence[Message]) -> Iterator[ImageInput]:
    for found in chat_parts(messages, "image_url"):
        given = found.part.image_url
        yield ImageInput(*found, given.get("url") if isinstance(given, dict) else given)


def _block_images(messages: Sequence[MessagesTurn]) -> Iterator[ImageInput]:
    for found in blocks_with_source(messages, ImageBlock):
        source = found.part.source if isinstance(found.part.source, dict) else {}
        data = source.get("data")
        url = source.get("url") if data is None else f"{_DATA};base64,{data}"
        yield ImageInput(*found, url, source.get("file_id"))


async def _seen(
    edge: Edge, request: web.BaseRequest, inputs: Sequence[ImageInput], rule: ImageTokens
) -> SeenImages | None:
    """Raises KvloomError, but an image of the history that cannot be read is left out, and so are the oldest ones for
    which there is no room."""
    if not inputs:
        return None
    images, marks, left = PromptImages(), dict[int, str](), MAX_IMAGE_BYTES
    fetcher = edge.fetcher.of_request()
    for number, one in enumerate(reversed(inputs)):
        with naming(one.at, is_asked=one.is_asked):
            _check_number(number, one)
            content = await _content_of(edge, request, one, left, fetcher)
            media_type, width, height = await _checked(one, content)
            token_ids = await asyncio.to_thread(_token_ids, content, rule, width, height)
            marks[id(one.part)] = images.add(media_type, content, token_ids)
            left -= len(content)
    return SeenImages(images, marks) if marks else None


def _token_ids(content: bytes, rule: ImageTokens, width: int, height: int) -> array[int]:
    return image_token_ids(content, num_image_tokens(rule, width, height))


async def _checked(one: ImageInput, content: bytes) -> tuple[str, int, int]:
    """The type, width and height. Raises KvloomError (INVALID_ARGUMENT)."""
    try:
        return await asyncio.to_thread(size_of, content)
    except ImageError as error:
        raise invalid_argument(f"{one.at}: the image {error}.", one.at) from error


async def _content_of(
    edge: Edge, request: web.BaseRequest, one: ImageInput, max_bytes: int, fetcher: UrlFetcher
) -> bytes:
    """At most so many bytes. Raises KvloomError."""
    if isinstance(one.file_id, str) and one.file_id:
        content = await _file(edge, request, one, max_bytes)
    elif not isinstance(one.url, str) or not one.url:
        raise invalid_argument(f"{one.at} has neither a URL nor a file_id.", one.at)
    elif one.url.startswith(_DATA):
        content = await asyncio.to_thread(_decoded, one)
    else:
        content, _ = await fetcher.fetch(one.url, one.at, max_bytes)
    if len(content) > max_bytes:
        raise _too_large(one)
    return content


def _decoded(one: ImageInput) -> bytes:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    _, _, data = one.url.partition(",")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_argument(f"{one.at}: the image is not base64.", one.at) from error


async def _file(edge: Edge, request: web.BaseRequest, one: ImageInput, max_bytes: int) -> bytes:
    """Raises KvloomError."""
    if edge.orchestrator is None:
        message = f"{one.at}: files are stored by an orchestrator, and there is none (kvloom up --orchestrator)."
        raise unsupported(message, one.at)
    pieces, num_bytes = list[bytes](), 0
    async with contextlib.aclosing(edge.orchestrator.read_file(owner_of(edge, request), one.file_id)) as responses:
        async for response in responses:
            num_bytes += len(response.piece)
            if num_bytes > max_bytes:
                raise _too_large(one)
            pieces.append(response.piece)
    return b"".join(pieces)


def _check_number(number: int, one: ImageInput) -> None:
    """`number`: how many images have been read before this one. Raises KvloomError (INVALID_ARGUMENT)."""
    if number >= MAX_IMAGES:
        raise invalid_argument(f"{one.at}: a request has at most {MAX_IMAGES} images.", one.at)


def _too_large(one: ImageInput) -> KvloomError:
    message = f"{one.at}: the images of a request have at most {MAX_IMAGE_BYTES} bytes together."
    return KvloomError(ErrorReason.ERROR_REASON_REQUEST_TOO_LARGE, message, field=one.at)
