"""Responses and conversations that are stored, as OpenAI's client uses them, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from kvloom_common.database.database import Database
from orchestrator.database.schema import items, objects
from orchestrator.store.expiry import delete_expired
from tests.fakes.fake_router_link import answer
from tests.fakes.state_world import StateWorld, state_world, state_world_on

DAY = 86_400.0


pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests of a database share their world


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]
)
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StateWorld]:
    async with state_world_on(request, tmp_path_factory) as started:
        yield started


@pytest.fixture
def world(shared: StateWorld) -> StateWorld:
    shared.edge.link.script = answer("Hello", " you")
    return shared


async def num_rows(database: Database) -> int:
    async with database.reading() as connection:
        return sum([len((await connection.execute(table.select())).all()) for table in (objects, items)])


async def refused(call: Awaitable[Any]) -> tuple[int, dict[str, Any]]:
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    return caught.value.status_code, dict(caught.value.body)


async def test_a_response_is_stored_unless_the_request_says_otherwise(world: StateWorld) -> None:
    """OpenAI's clients expect to find what they have asked for; who does not want that says so."""
    client = world.client
    made = await client.responses.create(model="tiny", input="the fox", metadata={"topic": "foxes"})
    assert made.store is True
    found = await client.responses.retrieve(made.id)
    assert found == made
    assert found.output_text == "Hello you"
    unstored = await client.responses.create(model="tiny", input="the fox", store=False)
    assert unstored.store is False
    assert (await refused(client.responses.retrieve(unstored.id)))[0] == 404


async def test_a_streamed_response_can_be_found_by_who_has_its_last_event(world: StateWorld) -> None:
    """The event says that the response exists. One stream is one lifecycle: numbers and places never restart."""
    async with world.client.responses.stream(model="tiny", input="the fox") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds.count("response.created") == kinds.count("response.completed") == 1
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    found = await world.client.responses.retrieve(final.id)
    assert found.model_dump(exclude={"output"}) == final.model_dump(exclude={"output"})
    assert found.output_text == final.output_text == "Hello you"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_response_follows_another_one(world: StateWorld, is_streamed: bool) -> None:
    """The client sends the new message alone. The instructions are not inherited, as with OpenAI."""
    client = world.client
    first = await client.responses.create(model="tiny", input="first question", instructions="be brief")
    world.edge.link.script = answer("Fine")
    more: dict[str, Any] = {"model": "tiny", "input": "second question", "previous_response_id": first.id}
    if is_streamed:
        async with client.responses.stream(**more) as stream:
            second = await stream.get_final_response()
    else:
        second = await client.responses.create(**more)
    assert second.previous_response_id == first.id
    prompt = world.prompt()
    assert prompt.index("first question") < prompt.index("Hello you") < prompt.index("second question")
    assert "be brief" not in prompt
    third = await client.responses.create(model="tiny", input="third question", previous_response_id=second.id)
    prompt = world.prompt()
    assert prompt.index("Hello you") < prompt.index("Fine") < prompt.index("third question")
    listed = [item async for item in client.responses.input_items.list(third.id, order="asc", limit=2)]
    texts = [item.content[0].text for item in listed]
    assert texts == ["first question", "Hello you", "second question", "Fine", "third question"]
    newest = await client.responses.input_items.list(third.id, limit=1)
    assert newest.data[0].content[0].text == "third question"
    assert newest.has_more


async def test_items_are_named_by_reference(world: StateWorld) -> None:
    """Vercel's AI SDK sends references to what is stored."""
    first = await world.client.responses.create(model="tiny", input="first question")
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    question: Any = {"role": "user", "content": "and then?"}
    await world.client.responses.create(model="tiny", input=[reference, question])
    assert world.prompt().index("Hello you") < world.prompt().index("and then?")
    status, error = await refused(world.other.responses.create(model="tiny", input=[reference, question]))
    assert (status, error["param"]) == (404, "input")


async def test_a_deleted_response_is_gone_with_its_items(world: StateWorld) -> None:
    """Erasure leaves no row behind, and what follows a deleted response says so rather than answer without it."""
    client, before = world.client, await num_rows(world.database)
    first = await client.responses.create(model="tiny", input="first question")
    second = await client.responses.create(model="tiny", input="second question", previous_response_id=first.id)
    await client.responses.delete(first.id)
    assert (await refused(client.responses.retrieve(first.id)))[0] == 404
    status, error = await refused(client.responses.create(model="tiny", input="third", previous_response_id=second.id))
    assert (status, error["param"]) == (404, "previous_response_id")
    await client.responses.delete(second.id)
    assert await num_rows(world.database) == before


async def test_a_conversation_has_what_was_asked_and_answered(world: StateWorld) -> None:
    client = world.client
    made = await client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "an earlier question"}], metadata={"title": "Foxes"}
    )
    assert made.metadata == {"title": "Foxes"}
    response = await client.responses.create(model="tiny", input="the fox", conversation=made.id)
    assert response.conversation is not None
    assert response.conversation.id == made.id
    assert "an earlier question" in world.prompt()
    world.edge.link.script = answer("Bye")
    async with client.responses.stream(
        model="tiny", input=[{"role": "user", "content": "and now?"}], conversation={"id": made.id}
    ) as stream:
        await stream.get_final_response()
    prompt = world.prompt()
    assert prompt.index("an earlier question") < prompt.index("Hello you") < prompt.index("and now?")
    items = [item async for item in client.conversations.items.list(made.id, limit=2)]
    texts = [item.content[0].text for item in items]
    assert texts == ["Bye", "and now?", "Hello you", "the fox", "an earlier question"]
    assert [item.role for item in items] == ["assistant", "user"] * 2 + ["user"]


async def test_a_conversation_is_changed_and_deleted(world: StateWorld) -> None:
    client, before = world.client, await num_rows(world.database)
    made = await client.conversations.create()
    assert await client.conversations.retrieve(made.id) == made
    changed = await client.conversations.update(made.id, metadata={"title": "Cats"})
    assert changed.metadata == {"title": "Cats"}
    added = await client.conversations.items.create(
        made.id,
        items=[
            {"type": "message", "role": "user", "content": "one"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "two"},
        ],
    )
    ids = [item.id for item in added.data]
    assert [item.type for item in added.data] == ["message", "function_call", "function_call_output"]
    assert (await client.conversations.items.retrieve(ids[1] or "", conversation_id=made.id)).type == "function_call"
    left = await client.conversations.items.delete(ids[0] or "", conversation_id=made.id)
    assert left == changed
    assert [item.id async for item in client.conversations.items.list(made.id, order="asc")] == ids[1:]
    assert (await client.conversations.delete(made.id)).deleted
    assert (await refused(client.conversations.retrieve(made.id)))[0] == 404
    assert await num_rows(world.database) == before


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_chat_completions_are_stored_on_demand(world: StateWorld, is_streamed: bool) -> None:
    client, topic = world.client, f"t{is_streamed}"
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}],
        "metadata": {"topic": topic},
    }
    await client.chat.completions.create(**asked)
    if is_streamed:
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, store=True, stream=True)]
        made_id = chunks[0].id
    else:
        made_id = (await client.chat.completions.create(**asked, store=True)).id
    found = await client.chat.completions.retrieve(made_id)
    assert found.choices[0].message.content == "Hello you"
    assert found.usage is not None
    assert found.usage.completion_tokens == 2
    assert [one.id async for one in client.chat.completions.list(metadata={"topic": topic})] == [made_id]
    assert made_id in [one.id async for one in client.chat.completions.list(model="tiny", limit=1)]
    messages = [one async for one in client.chat.completions.messages.list(made_id)]
    assert [(one.role, one.content) for one in messages] == [("system", "be brief"), ("user", "the fox")]
    changed: Any = await client.chat.completions.update(made_id, metadata={"topic": "cats"})
    assert changed.metadata == {"topic": "cats"}
    assert [one async for one in client.chat.completions.list(metadata={"topic": topic})] == []
    for ask in (world.other.chat.completions.retrieve, world.other.chat.completions.delete):
        assert (await refused(ask(made_id)))[0] == 404
    assert (await client.chat.completions.delete(made_id)).deleted
    assert (await refused(client.chat.completions.retrieve(made_id)))[0] == 404


OF_OTHERS: dict[str, Callable[[openai.AsyncOpenAI, str, str, str], Coroutine[Any, Any, Any]]] = {
    "response": lambda client, one, *_: client.responses.retrieve(one),
    "response's deletion": lambda client, one, *_: client.responses.delete(one),
    "response's input": lambda client, one, *_: client.responses.input_items.list(one)._get_page(),
    "previous response": lambda client, one, *_: client.responses.create(
        model="tiny", input="a", previous_response_id=one
    ),
    "conversation": lambda client, _, two, *__: client.conversations.retrieve(two),
    "conversation's change": lambda client, _, two, *__: client.conversations.update(two, metadata={}),
    "conversation's deletion": lambda client, _, two, *__: client.conversations.delete(two),
    "conversation of a response": lambda client, _, two, *__: client.responses.create(
        model="tiny", input="a", conversation=two
    ),
    "item": lambda client, _, two, three: client.conversations.items.retrieve(three, conversation_id=two),
    "item's deletion": lambda client, _, two, three: client.conversations.items.delete(three, conversation_id=two),
    "new items": lambda client, _, two, *__: client.conversations.items.create(
        two, items=[{"role": "user", "content": "a", "type": "message"}]
    ),
}


async def test_unknown_foreign_and_expired_ids_are_alike(world: StateWorld) -> None:
    """Whoever tries ids must not learn which exist. Another tenant changes and reads nothing."""
    response = await world.client.responses.create(model="tiny", input="the fox")
    conversation = await world.client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "one"}]
    )
    [item] = [item async for item in world.client.conversations.items.list(conversation.id)]
    ids = (response.id, conversation.id, item.id or "")
    num_requests = len(world.edge.link.requests)
    for what, ask in OF_OTHERS.items():
        if what == "response's input":
            continue
        foreign = await refused(ask(world.other, *ids))
        unknown = await refused(ask(world.other, *(one[:5] + "x" * (len(one) - 5) for one in ids)))
        assert foreign[0] == unknown[0] == 404, what
        assert {**foreign[1], "message": ""} == {**unknown[1], "message": ""}, what
    with pytest.raises(openai.NotFoundError):
        await world.other.responses.input_items.list(response.id)
    assert len(world.edge.link.requests) == num_requests
    assert await world.client.responses.retrieve(response.id) == response
    world.now += 31 * DAY
    assert (await refused(world.client.responses.retrieve(response.id)))[0] == 404
    await world.client.conversations.retrieve(conversation.id)  # conversations stay
    before = await num_rows(world.database)
    assert await delete_expired(world.database, world.contents, world.now) > 0
    assert await num_rows(world.database) < before
    assert await delete_expired(world.database, world.contents, world.now) == 0


BAD: list[tuple[str, str, dict[str, Any], str]] = [
    ("POST", "/conversations", {"items": [{"role": "nobody", "content": "a"}]}, "items[0].role"),
    ("POST", "/conversations", {"items": [1]}, "items[0]"),
    ("POST", "/conversations", {"items": [{"role": "user", "content": "a"}] * 21}, "items"),
    ("POST", "/conversations", {"metadata": {"a": 1}}, "metadata[...]"),
    ("POST", "/conversations", {"metadata": {"a": "b" * 513}}, "metadata[...]"),
    ("POST", "/responses", {"input": "a", "conversation": "c", "previous_response_id": "r"}, "conversation"),
    ("POST", "/responses", {"input": "a", "conversation": "c", "store": False}, "store"),
    ("POST", "/responses", {"input": "a", "background": True, "store": False}, "store"),
    ("GET", "/conversations/ID/items?limit=0", {}, "limit"),
    ("GET", "/conversations/ID/items?limit=101", {}, "limit"),
    ("GET", "/conversations/ID/items?order=up", {}, "order"),
    ("GET", "/conversations/ID/items?after=nothing", {}, "after"),
]


@pytest.mark.parametrize(("method", "path", "body", "field"), BAD)
async def test_bad_input_is_named(world: StateWorld, method: str, path: str, body: dict[str, Any], field: str) -> None:
    """A client learns which of its fields is wrong."""
    conversation = await world.client.conversations.create()
    url = f"{world.edge.url}/v1{path}".replace("ID", conversation.id)
    headers = {"Authorization": f"Bearer {world.client.api_key}"}
    sent = {"json": {"model": "tiny", **body} if path == "/responses" else body} if method == "POST" else {}
    async with world.edge.http.request(method, url, headers=headers, **sent) as response:
        assert response.status == 400, await response.text()
        assert (await response.json())["error"]["param"] == field


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_response_that_cannot_be_stored_does_not_seem_to_be(tmp_path: Path, is_streamed: bool) -> None:
    """A client that has a completed response relies on finding it."""
    async with state_world(f"sqlite:///{tmp_path}/state.db", tmp_path) as world:
        if is_streamed:
            asking = asyncio.create_task(world.client.responses.create(model="tiny", input="the fox", stream=True))
            request = await world.edge.link.next_request()
            request.start()
            stream = await asking
            await world.server.stop(None)
            request.tokens("Hello")
            request.finish()
            events = [event async for event in stream]
            kinds = [event.type for event in events]
            assert kinds[-1] == "response.failed"
            assert "response.completed" not in kinds
            assert [event.sequence_number for event in events] == list(range(len(events)))
            return
        asking = asyncio.create_task(world.client.responses.create(model="tiny", input="the fox"))
        request = await world.edge.link.next_request()
        await world.server.stop(None)
        request.start()
        request.tokens("Hello")
        request.finish()
        status, error = await refused(asking)
        assert (status, error["code"]) == (503, "orchestrator_unavailable")
