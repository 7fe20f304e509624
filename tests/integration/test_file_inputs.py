"""Files that requests give to the model, in the APIs of all clients."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from orchestrator.search import extraction
from tests.fakes.edge_world import edge_world
from tests.fakes.fake_control import SEARCH_KEY
from tests.fakes.fake_router_link import answer
from tests.fakes.state_world import StateWorld, state_world
from tests.lazy_imports import imported_when_used
from tests.waiting import eventually

anthropic = imported_when_used("anthropic")
pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share their world

TEXT = "The Jacquard loom reads punched cards."
CSV = b"city,people\nOslo,700000\n"
ROW = "city: Oslo, people: 700000"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StateWorld]:
    folder = tmp_path_factory.mktemp("file-inputs")
    async with state_world(f"sqlite:///{folder}/state.db", folder) as started:
        started.edge.link.script = answer("It reads.")
        yield started


async def file_id(world: StateWorld, name: str = "loom.md", content: bytes = TEXT.encode()) -> str:
    return (await world.client.files.create(file=(name, content), purpose="user_data")).id


def data_url(content: bytes, kind: str = "text/csv") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def asked(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


async def respond(client: openai.AsyncOpenAI, part: Any, **more: Any) -> Any:
    given: Any = asked({"type": "input_file", **part}, {"type": "input_text", "text": "Why?"})
    return await client.responses.create(model="tiny", input=given, **more)


async def chat(client: openai.AsyncOpenAI, part: Any, text: str = "Why?") -> Any:
    given: Any = asked({"type": "file", "file": part}, {"type": "text", "text": text})
    return await client.chat.completions.create(model="tiny", messages=given)


async def test_the_model_reads_the_text_of_a_file_before_the_question(world: StateWorld) -> None:
    """All APIs take stored files and contents, and the text stands where the file stood, between marks."""
    stored, inline = {"file_id": await file_id(world)}, {"filename": "a.csv", "file_data": data_url(CSV)}
    for part, name, text in ((stored, "loom.md", TEXT), (inline, "a.csv", ROW)):
        for ask in (chat, respond):
            await ask(world.client, part)
            prompt = world.prompt()
            assert f"The file {name} is attached:" in prompt
            assert prompt.index(text) < prompt.index("Why?")
    async with anthropic.AsyncAnthropic(base_url=world.edge.url, api_key=SEARCH_KEY) as client:
        csv = base64.b64encode(CSV).decode()
        sources: tuple[tuple[Any, str], ...] = (
            ({"type": "file", "file_id": stored["file_id"]}, TEXT),
            ({"type": "base64", "media_type": "text/csv", "data": csv}, ROW),
        )
        for source, text in sources:
            document: Any = {"type": "document", "title": "a.csv", "source": source}
            given: Any = asked(document, {"type": "text", "text": "Why?"})
            await client.messages.create(model="tiny", max_tokens=4, messages=given)
            assert text in world.prompt()


async def test_the_tokens_of_a_prompt_with_a_file(world: StateWorld) -> None:
    """Whoever asks how long a prompt is gets what the model would read: the file's text, for its own tenant alone."""
    part: Any = {"type": "file", "file": {"file_id": await file_id(world)}}
    body = {"model": "tiny", "messages": asked(part, {"type": "text", "text": "Why?"})}
    await world.client.chat.completions.create(**body)
    url = f"{world.edge.url}/tokenize"
    for client, status in ((world.client, 200), (world.other, 404)):
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with world.edge.http.post(url, json=body, headers=headers) as response:
            answered = await response.json()
            assert response.status == status, answered
            if status == 200:
                assert answered["tokens"] == list(world.edge.link.requests[-1].request.prompt_token_ids)
                assert TEXT in world.prompt()
            else:
                assert answered["error"]["param"] == "messages[0].content[0].file"


async def test_a_conversation_keeps_its_files(world: StateWorld) -> None:
    """The items are stored with the file, and each later turn has its text at the same place: the prefix is the
    same."""
    stored = await file_id(world)
    first = await respond(world.client, {"file_id": stored})
    before = world.prompt()
    items = await world.client.responses.input_items.list(first.id)
    content: Any = items.data[0]
    assert (content.content[0].type, content.content[0].file_id) == ("input_file", stored)
    await world.client.responses.create(model="tiny", input="And then?", previous_response_id=first.id)
    assert world.prompt().startswith(before.split("Why?", maxsplit=1)[0])
    conversation = await world.client.conversations.create()
    given: Any = [{"type": "message", **asked({"type": "input_file", "file_id": stored})[0]}]
    await world.client.conversations.items.create(conversation.id, items=given)
    await world.client.responses.create(model="tiny", input="Why?", conversation=conversation.id)
    assert TEXT in world.prompt()


async def test_a_background_response_has_the_text_that_it_began_with(world: StateWorld) -> None:
    """It is generated after its file was deleted as it would have been before."""
    stored = await file_id(world)
    begun = await respond(world.client, {"file_id": stored}, background=True)
    await world.client.files.delete(stored)

    async def has_ended() -> bool:
        return (await world.client.responses.retrieve(begun.id)).status == "completed"

    async with world.jobs():
        await eventually(has_ended, "the end of the response")
    assert TEXT in world.prompt()


async def test_a_file_of_the_history_that_is_gone_leaves_a_note(world: StateWorld) -> None:
    stored = await file_id(world)
    first = await respond(world.client, {"file_id": stored})
    await world.client.files.delete(stored)
    await world.client.responses.create(model="tiny", input="And then?", previous_response_id=first.id)
    assert TEXT not in world.prompt()
    assert "[file left out" in world.prompt()


BAD: list[tuple[dict[str, Any], int]] = [
    ({"file_id": "file-none"}, 404),
    ({"filename": "a.bin", "file_data": data_url(b"\0\1\2", "application/octet-stream")}, 400),
    ({"filename": "a.png", "file_data": data_url(b"\x89PNG\r\n\x1a\n", "image/png")}, 400),
    ({"filename": "a.txt", "file_data": data_url(b" \n")}, 400),
    ({"filename": "a.txt", "file_data": "data:text/plain;base64,!"}, 400),
    ({}, 400),
]


@pytest.mark.parametrize(("part", "status"), BAD)
async def test_what_cannot_be_read_is_refused_by_its_field(world: StateWorld, part: Any, status: int) -> None:
    """The model is not asked about a document that it does not get."""
    num_before = len(world.edge.link.requests)
    for ask, field in ((chat, "messages[0].content[0].file"), (respond, "input[0].content[0]")):
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(world.client, part)
        assert (caught.value.status_code, caught.value.param) == (status, field)
    assert len(world.edge.link.requests) == num_before


async def test_other_tenants_cannot_read_a_file(world: StateWorld) -> None:
    """Not even one whose text is known already."""
    part = {"file_id": await file_id(world)}
    await chat(world.client, part)
    for ask in (chat, respond):
        with pytest.raises(openai.NotFoundError):
            await ask(world.other, part)


async def test_a_file_is_parsed_once(world: StateWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation sends the same file with each turn; another tenant has it parsed again."""
    num = 0
    text_of = extraction.text_of

    async def counted(name: str, content: bytes, max_seconds: float) -> str:
        nonlocal num
        num += 1
        return await text_of(name, content, max_seconds)

    monkeypatch.setattr(extraction, "text_of", counted)
    part = {"filename": "b.md", "file_data": data_url(b"# Once")}
    for client, expected in ((world.client, 1), (world.client, 1), (world.other, 2)):
        await chat(client, part)
        assert num == expected


async def test_a_request_has_a_bound_on_its_files(world: StateWorld) -> None:
    part = {"type": "file", "file": {"filename": "a.txt", "file_data": data_url(b"a")}}
    given: Any = asked(*([part] * 33))
    with pytest.raises(openai.BadRequestError, match="at most 32 files"):
        await world.client.chat.completions.create(model="tiny", messages=given)


async def test_without_an_orchestrator_files_are_refused_by_name() -> None:
    async with (
        edge_world() as edge,
        openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for ask in (chat, respond):
            with pytest.raises(openai.BadRequestError, match="without an orchestrator"):
                await ask(client, {"file_id": "file-1"})
