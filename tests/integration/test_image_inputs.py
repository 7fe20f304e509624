"""Images that requests show to a model, in the APIs of all clients: over an edge, a router and simulated shards, and
with files that an orchestrator has."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from kvloom.v1.generation_pb2 import ImageTokens
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.text.prompt_images import FIRST_IMAGE_ID, MAX_IMAGE_BYTES, MAX_IMAGES
from kvloom_common.text.tokenizer import ModelTokenizer
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.embedding_world import EmbeddingWorld, embedding_world, sim_engine
from tests.fakes.fake_control import SEARCH_KEY
from tests.fakes.fake_router_link import answer
from tests.fakes.pictures import data_url, png, png_of
from tests.fakes.state_world import StateWorld, state_world
from tests.lazy_imports import imported_when_used
from tests.waiting import eventually

anthropic = imported_when_used("anthropic")
pytest_plugins = ("tests.fakes.router_fixtures",)

BLOCK = 16
TEXT = "the quick brown fox jumps over the lazy dog " * 4
"""It has some blocks by itself."""


def chat_parts(picture: bytes, question: str = "the fox") -> list[Any]:
    return [
        {"type": "text", "text": TEXT},
        {"type": "image_url", "image_url": {"url": data_url(picture), "detail": "low"}},
        {"type": "text", "text": question},
    ]


@pytest.fixture
async def fabric(router_redis_url: str, tokenizer: ModelTokenizer) -> AsyncIterator[EmbeddingWorld]:
    engine = sim_engine(sees_images=True, block_size=BLOCK)
    async with embedding_world(router_redis_url, tokenizer, engine) as started:
        yield started


async def asked(fabric: EmbeddingWorld, path: str, **body: Any) -> Any:
    status, answered = await fabric.post(path, **body)
    assert status == 200, answered
    return answered


async def test_the_answer_and_the_cache_depend_on_the_image(fabric: EmbeddingWorld) -> None:
    """An image that is sent again is found in the cache, and another one of the same size is not: its answer is another
    one, after the same text before it."""
    first, second = png(560, 280, shade=10), png(560, 280, shade=200)

    async def ask(picture: bytes) -> tuple[str, int, int]:
        messages = [{"role": "user", "content": chat_parts(picture)}]
        made = await asked(fabric, "/v1/chat/completions", messages=messages, max_tokens=8, seed=7)
        usage = made["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return made["choices"][0]["message"]["content"], usage["prompt_tokens"], cached

    text, size, cached = await ask(first)
    assert size > 560 * 280 // 28**2, "a token for each patch of 28 x 28 pixels"
    assert cached == 0
    again, _, cached_again = await ask(first)
    assert again == text
    assert cached_again == (size - 1) // BLOCK * BLOCK
    other, other_size, cached_other = await ask(second)
    assert other != text
    assert other_size == size
    assert 0 < cached_other < cached_again, "the text before the image is shared"


def prompt_size(made: Any) -> int:
    """In tokens, whatever the API."""
    usage = made["usage"]
    return usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)


async def test_all_apis_show_the_model_the_same_image(fabric: EmbeddingWorld) -> None:
    """The image has as many tokens in each, and what was asked about it before is in later turns."""
    picture = png(280, 280, shade=50)
    content = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture).decode()}
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": chat_parts(picture)}], "max_tokens": 4},
        "/v1/responses": {
            "max_output_tokens": 16,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": TEXT},
                        {"type": "input_image", "image_url": data_url(picture)},
                    ],
                }
            ],
        },
        "/v1/messages": {
            "max_tokens": 4,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": "image", "source": content}]}
            ],
        },
    }
    for path, body in bodies.items():
        name = "input" if "input" in body else "messages"
        seen = prompt_size(await asked(fabric, path, **body))
        plain: Any = [dict(body[name][0], content=[body[name][0]["content"][0]])]
        blind = prompt_size(await asked(fabric, path, **{**body, name: plain}))
        assert 100 <= seen - blind <= 110, path
        later = [*body[name], {"role": "assistant", "content": "Grey."}, {"role": "user", "content": "And now?"}]
        assert prompt_size(await asked(fabric, path, **{**body, name: later})) > seen, path
    counted = await asked(fabric, "/tokenize", messages=bodies["/v1/chat/completions"]["messages"])
    assert sum(token >= FIRST_IMAGE_ID for token in counted["tokens"]) == 100


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_the_usual_types_are_seen(kind: str, fabric: EmbeddingWorld) -> None:
    """They are told by their contents, whatever the client calls them."""
    file = io.BytesIO()
    Image.new("RGB", (56, 28)).save(file, kind)
    url = data_url(file.getvalue(), "application/octet-stream")
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    made = await asked(fabric, "/tokenize", messages=[{"role": "user", "content": parts}])
    assert sum(token >= FIRST_IMAGE_ID for token in made["tokens"]) == 2


BAD = {
    "no image": (data_url(b"<svg/>"), 400),
    "not base64": ("data:image/png;base64,!!", 400),
    "cut off": (data_url(png()[:12]), 400),
    "a bomb": (data_url(png_of(16_000, 16_000, b"")), 400),
    "a wide one": (data_url(png_of(70_000, 1, b"")), 400),
    "no URL": ("", 400),
    "a URL": ("https://example.com/a.png", 400),
    "a file": ("file:///etc/passwd", 400),
}


@pytest.mark.parametrize(("url", "status"), BAD.values(), ids=BAD)
async def test_what_cannot_be_seen_is_refused_by_its_field(url: str, status: int, fabric: EmbeddingWorld) -> None:
    """Before it reaches a shard, and in the form of each API. In the history it leaves a note instead."""
    part = {"type": "image_url", "image_url": {"url": url}}
    messages: list[Any] = [{"role": "user", "content": [part]}]
    answered = await fabric.post("/v1/chat/completions", messages=messages)
    assert (answered[0], answered[1]["error"]["param"]) == (status, "messages[0].content[0].image_url")
    items: list[Any] = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    answered = await fabric.post("/v1/responses", input=items)
    assert (answered[0], answered[1]["error"]["param"]) == (status, "input[0].content[0]")
    block = {"type": "image", "source": {"type": "url", "url": url}}
    answered = await fabric.post("/v1/messages", max_tokens=4, messages=[{"role": "user", "content": [block]}])
    assert answered[0] == status
    assert "messages[0].content[0].source" in answered[1]["error"]["message"]
    messages += [{"role": "assistant", "content": "What?"}, {"role": "user", "content": "the fox"}]
    assert (await fabric.post("/v1/chat/completions", messages=messages, max_tokens=2))[0] == 200


async def test_a_mark_in_a_text_is_a_text(fabric: EmbeddingWorld, tokenizer: ModelTokenizer) -> None:
    """Nobody can write what stands for an image, nor have the tokens of special strings by an image beside them."""
    [end] = tokenizer.encode_now("<|im_end|>")
    counts = set()
    for question in ("why?", "\ufdd0aaaa\ufdd1 <|im_end|>"):
        parts = chat_parts(png(), question=question)
        made = await asked(fabric, "/tokenize", messages=[{"role": "user", "content": parts}])
        counts.add(made["tokens"].count(end))
    assert len(counts) == 1, "those of the template"


def with_vision(world: EdgeWorld) -> None:
    info = ModelInfo(name="tiny", num_ready_shards=1, max_model_len=4096, capabilities=["vision"])
    info.image_tokens.CopyFrom(ImageTokens(patch_pixels=28, max_tokens=64))
    world.link.tell(FleetState(models=[info]))
    world.link.script = answer("Grey.")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[StateWorld]:
    async with state_world(f"sqlite:///{tmp_path}/state.db", tmp_path) as started:
        with_vision(started.edge)
        yield started


def images_of(world: StateWorld) -> list[bytes]:
    return [image.data for image in world.edge.link.requests[-1].request.submit.request.images]


async def respond(client: openai.AsyncOpenAI, file_id: str, **more: Any) -> Any:
    part = {"type": "input_image", "file_id": file_id, "detail": "auto"}
    given: Any = [{"role": "user", "content": [part, {"type": "input_text", "text": "Which colour?"}]}]
    return await client.responses.create(model="tiny", input=given, **more)


async def test_stored_files_are_images(world: StateWorld) -> None:
    """A conversation keeps the file's name and not its content, later turns show it at the same place, and when it was
    deleted they say so. Another tenant has no such file."""
    stored = (await world.client.files.create(file=("a.png", png()), purpose="vision")).id
    first = await respond(world.client, stored)
    assert images_of(world) == [png()]
    before = world.prompt()
    items = await world.client.responses.input_items.list(first.id)
    assert [part.type for part in items.data[0].content] == ["input_image", "input_text"]  # type: ignore[union-attr]
    await world.client.responses.create(model="tiny", input="And why?", previous_response_id=first.id)
    assert images_of(world) == [png()]
    assert world.prompt().startswith(before.split("Which", maxsplit=1)[0])
    with pytest.raises(openai.NotFoundError):
        await respond(world.other, stored)
    with pytest.raises(openai.APIStatusError, match="cannot be continued at a token"):  # the file may be another one
        await world.client.responses.create(model="tiny", previous_response_id=first.id, extra_body={"at": 0})
    async with anthropic.AsyncAnthropic(base_url=world.edge.url, api_key=SEARCH_KEY) as client:
        block: Any = {"type": "image", "source": {"type": "file", "file_id": stored}}
        await client.messages.create(model="tiny", max_tokens=4, messages=[{"role": "user", "content": [block]}])
    assert images_of(world) == [png()]
    await world.client.files.delete(stored)
    await world.client.responses.create(model="tiny", input="And why?", previous_response_id=first.id)
    assert images_of(world) == []
    assert "[image left out" in world.prompt()


async def test_a_stored_file_may_be_too_large_for_an_image(world: StateWorld) -> None:
    """It is read no further than images may go, and the refusal names the field."""
    content = png() + bytes(MAX_IMAGE_BYTES)
    stored = (await world.client.files.create(file=("a.png", content), purpose="vision")).id
    with pytest.raises(openai.APIStatusError) as caught:
        await respond(world.client, stored)
    assert caught.value.status_code == 413
    assert "input[0].content[0]" in str(caught.value)


async def test_a_background_response_sees_what_it_began_with(world: StateWorld) -> None:
    """It is generated after its file was deleted as it would have been before."""
    stored = (await world.client.files.create(file=("a.png", png()), purpose="vision")).id
    begun = await respond(world.client, stored, background=True)
    await world.client.files.delete(stored)

    async def has_ended() -> bool:
        return (await world.client.responses.retrieve(begun.id)).status == "completed"

    async with world.jobs():
        await eventually(has_ended, "the end of the response")
    assert images_of(world) == [png()]


def part_of(picture: bytes) -> Any:
    return {"type": "input_image", "image_url": data_url(picture), "detail": "auto"}


def pictures(count: int) -> list[Any]:
    return [part_of(png(60, 30, shade)) for shade in range(count)]


@pytest.mark.parametrize("background", [False, True])
async def test_the_newest_images_have_room(world: StateWorld, background: bool) -> None:
    """A conversation with many images goes on with others. A turn that has too many itself is refused."""
    old: Any = [{"role": "user", "content": pictures(MAX_IMAGES)}, {"role": "assistant", "content": "Grey."}]
    new: Any = {"role": "user", "content": [part_of(png(30, 60))]}
    begun = await world.client.responses.create(model="tiny", input=[*old, new], background=background)

    async def has_ended() -> bool:
        return (await world.client.responses.retrieve(begun.id)).status == "completed"

    async with world.jobs():
        await eventually(has_ended, "the end of the response")
    seen = images_of(world)
    assert (len(seen), seen[0], seen[-1]) == (MAX_IMAGES, png(60, 30, 1), png(30, 60))
    assert "[image left out" in world.prompt()
    many: Any = [{"role": "user", "content": pictures(MAX_IMAGES + 1)}]
    with pytest.raises(openai.BadRequestError, match="at most 64 images") as caught:
        await world.client.responses.create(model="tiny", input=many, background=background)
    assert caught.value.param == "input[0].content[0]"


async def test_a_model_without_vision_refuses_by_name() -> None:
    """The question is not answered as if there were no image; images of the history leave a note."""
    async with edge_world() as world:
        world.link.script = answer("Hello")
        part = {"type": "image_url", "image_url": {"url": data_url(png())}}
        messages: list[Any] = [{"role": "user", "content": [part]}]
        status, refused = await world.chat(messages=messages)
        assert (status, refused["error"]["code"]) == (400, "unsupported_parameter")
        assert "vision" in refused["error"]["message"]
        messages += [{"role": "assistant", "content": "What?"}, {"role": "user", "content": "the fox"}]
        assert (await world.chat(messages=messages))[0] == 200
        assert not world.link.requests[-1].request.submit.request.images
