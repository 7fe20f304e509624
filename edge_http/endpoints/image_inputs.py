"""Images that a request shows to a model with the capability "vision": marks stand for them in the conversation until
it becomes a prompt. For a model without it nothing is read; what it is asked about an image is refused by name, and
images of the history are left out with a note."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import web

from edge_http.anthropic.blocks import ImageBlock, ToolResultBlock
from edge_http.anthropic.requests import MessagesTurn
from edge_http.edge import Edge
from edge_http.endpoints.file_inputs import naming
from edge_http.endpoints.ownership import owner_of
from edge_http.fetching import UrlFetcher
from edge_http.openai.requests import Message
from edge_http.wire.image_content import ImageError, size_of
from kvloom.conversation.earlier import asked_message
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
    items = _ImageItems(earlier, given, num_left_out)
    seen = await _seen(edge, request, items.images, rule)
    if seen is None:
        return earlier, given, None
    for one in items.images:
        if mark := seen.marks.get(id(one.part)):
            one.part.clear()
            one.part.update(type="input_text", text=mark)
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
    items = _ImageItems(earlier, given, 0)
    if not items.images:
        return earlier, given
    most, fetcher = edge.config.max_body_bytes // 2, edge.fetcher.of_request()
    for number, one in enumerate(reversed(items.images)):  # as they are seen
        with naming(one.at, is_asked=one.is_asked):
            _check_number(number, one)
            content = await _content_of(edge, request, one, most, fetcher)
            url = f"{_DATA}{(await _checked(one, content))[0]};base64,{base64.b64encode(content).decode()}"
            one.part.update(image_url=url, file_id=None)
            most -= len(url)
    return items.encoded()


class _ImageItems:
    """The items of a response, of which those are decoded that have images."""

    def __init__(self, earlier: Sequence[msgspec.Raw], given: str | Sequence[msgspec.Raw], num_left_out: int) -> None:
        self._given = given
        self._num_earlier = len(earlier)
        self._items = [*earlier, *(() if isinstance(given, str) else given)]
        self._decoded = {n: item for n, raw in enumerate(self._items) if (item := _with_images(raw)) is not None}
        self.images: list[ImageInput] = []
        if not self._decoded:
            return
        roles = [str(msgspec.json.decode(raw, type=_Role).role or "") for raw in self._items]
        asked = None if isinstance(given, str) else asked_message(roles)
        for number, item in self._decoded.items():
            at = f"input[{number - len(earlier) + num_left_out}]"
            self.images += _item_images(item, at, is_asked=number == asked)

    def encoded(self) -> tuple[list[msgspec.Raw], str | list[msgspec.Raw]]:
        """Returns the earlier items and the given ones, with what has become of their images."""
        items = list(self._items)
        for number, item in self._decoded.items():
            items[number] = msgspec.Raw(msgspec.json.encode(item))
        return items[: self._num_earlier], (self._given if isinstance(self._given, str) else items[self._num_earlier :])


class _Role(msgspec.Struct):
    role: Any = None


def _with_images(raw: msgspec.Raw) -> dict[str, Any] | None:
    """The item, if it has images; most have none, and are not decoded."""
    encoded = bytes(raw)
    if not any(kind.encode() in encoded for kind in _ITEM_KINDS):
        return None
    item = msgspec.json.decode(encoded)
    return item if isinstance(item, dict) else None


def _item_images(item: Mapping[str, Any], at: str, *, is_asked: bool) -> Iterator[ImageInput]:
    for name in ("content", "output"):
        parts = item.get(name)
        places = [(f"{at}.{name}", parts)] if isinstance(parts, dict) else []
        if isinstance(parts, list):
            places = [(f"{at}.{name}[{i}]", part) for i, part in enumerate(parts)]
        for place, part in places:
            if isinstance(part, dict) and part.get("type") in _ITEM_KINDS:
                yield ImageInput(part, place, is_asked, part.get("image_url"), part.get("file_id"))


def _chat_images(messages: Sequence[Message]) -> Iterator[ImageInput]:
    asked = asked_message([message.role for message in messages])
    for number, message in enumerate(messages):
        for i, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type == "image_url":
                given = part.image_url
                url = given.get("url") if isinstance(given, dict) else given
                yield ImageInput(part, f"messages[{number}].content[{i}].image_url", number == asked, url)


def _block_images(messages: Sequence[MessagesTurn]) -> Iterator[ImageInput]:
    asked = asked_message([message.role for message in messages])
    for number, message in enumerate(messages):
        for i, block in enumerate(message.content if isinstance(message.content, list) else ()):
            at = f"messages[{number}].content[{i}]"
            if isinstance(block, ImageBlock):
                yield _block_image(block, f"{at}.source", is_asked=number == asked)
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                for j, part in enumerate(block.content):
                    if isinstance(part, ImageBlock):
                        yield _block_image(part, f"{at}.content[{j}].source", is_asked=False)


def _block_image(block: ImageBlock, at: str, *, is_asked: bool) -> ImageInput:
    source = block.source if isinstance(block.source, dict) else {}
    data = source.get("data")
    url = source.get("url") if data is None else f"{_DATA};base64,{data}"
    return ImageInput(block, at, is_asked, url, source.get("file_id"))


async def _seen(
    edge: Edge, request: web.BaseRequest, inputs: Sequence[ImageInput], rule: ImageTokens
) -> SeenImages | None:
    """Raises KvloomError, but an image of the history that cannot be read is left out, and so are the oldest ones for
    which there is no room."""
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
