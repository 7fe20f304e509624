"""Conversations as users look for them, feedback, and exports: what OpenAI's API does not have."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from orchestrator.database.schema import items, objects
from orchestrator.store.expiry import delete_expired
from tests.fakes.fake_router_link import answer
from tests.fakes.state_world import StateWorld, state_world_on

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share their world

DAY = 86_400.0


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.long])],
)
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StateWorld]:
    async with state_world_on(request, tmp_path_factory) as started:
        started.edge.link.script = answer("Hello", " you")
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared: StateWorld) -> AsyncIterator[StateWorld]:
    yield shared
    async with shared.database.writing() as connection:
        for table in (items, objects):
            await connection.execute(table.delete())


async def asked(world: StateWorld, method: str, path: str, body: Any = None, *, of_other: bool = False) -> Any:
    client = world.other if of_other else world.client
    headers = {"Authorization": f"Bearer {client.api_key}"}
    url = f"{world.edge.url}/kvloom/v1{path}"
    async with world.edge.http.request(method, url, json=body, headers=headers) as response:
        text = await response.text()
        if response.content_type == "application/jsonl":
            return response.status, [json.loads(line) for line in text.splitlines()]
        return response.status, json.loads(text)


async def talk(world: StateWorld, *texts: str, **metadata: str) -> str:
    world.now += 1
    given: Any = [{"type": "message", "role": "user", "content": text} for text in texts]
    return (await world.client.conversations.create(items=given, metadata=metadata)).id


async def test_conversations_are_listed_with_titles(world: StateWorld) -> None:
    """The latest first. One without a title is called by what was said first."""
    first = await talk(world, "How do\n looms work? " + "x" * 100)
    second = await talk(world, "a", "b", title="Foxes", team="red")
    _, page = await asked(world, "GET", "/conversations?limit=1")
    [entry] = page["data"]
    assert (entry["id"], entry["title"], entry["num_items"]) == (second, "Foxes", 2)
    assert (page["has_more"], page["last_id"]) == (True, second)
    _, page = await asked(world, "GET", f"/conversations?after={second}")
    [entry] = page["data"]
    assert entry["id"] == first
    assert entry["title"].startswith("How do looms work? xxx")
    assert len(entry["title"]) == 80
    status, changed = await asked(world, "POST", f"/conversations/{second}", {"title": "Cats"})
    assert (status, changed["title"]) == (200, "Cats")
    assert (await world.client.conversations.retrieve(second)).metadata == {"title": "Cats", "team": "red"}


async def test_conversations_are_searched(world: StateWorld) -> None:
    """All words must be in one item; a snippet shows where. A page says after which one the next begins."""
    weaving = await talk(world, "nothing here", "b" * 300 + " The quick FOX weaves a loom " + "c" * 300)
    await talk(world, "a fox", "a loom")
    other = await talk(world, "fox loom")
    _, page = await asked(world, "GET", "/conversations?search=Loom%20fox")
    assert [one["id"] for one in page["data"]] == [other, weaving]
    [snippet] = page["data"][1]["snippets"]
    assert "quick FOX weaves a loom" in snippet["text"]
    assert len(snippet["text"]) <= 160
    _, page = await asked(world, "GET", "/conversations?search=loom%20fox&limit=1")
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([other], True)
    _, page = await asked(world, "GET", f"/conversations?search=loom%20fox&limit=1&after={page['last_id']}")
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([weaving], False)
    assert (await asked(world, "GET", "/conversations?search=zebra"))[1]["data"] == []
    for search in ("%20", "x" * 257):
        status, error = await asked(world, "GET", f"/conversations?search={search}")
        assert (status, error["error"]["param"]) == (400, "search")


async def test_a_search_of_much_goes_on_where_it_stopped(world: StateWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """No search takes longer than the reading of so many items."""
    wanted = await talk(world, "the fox")
    for _ in range(5):
        await talk(world, "a", "b")
    monkeypatch.setattr("orchestrator.api.history.MAX_SCANNED_ITEMS", 4)
    found, after, num_pages, has_more = list[str](), "", 0, True
    while has_more:
        _, page = await asked(world, "GET", f"/conversations?search=fox&after={after}")
        found += [one["id"] for one in page["data"]]
        after, has_more, num_pages = page["last_id"], page["has_more"], num_pages + 1
    assert (found, num_pages) == ([wanted], 3)


async def test_a_deleted_conversation_is_found_by_nobody_and_can_be_restored(world: StateWorld) -> None:
    """For thirty days; then it is gone with its items."""
    kept = await talk(world, "the fox")
    [item] = (await world.client.conversations.items.list(kept)).data
    status, removed = await asked(world, "DELETE", f"/conversations/{kept}")
    assert (status, removed["purged_at"]) == (200, int(world.now + 30 * DAY))
    reference: Any = [{"type": "item_reference", "id": item.id}, {"role": "user", "content": "x"}]
    for ask in (
        world.client.conversations.retrieve(kept),
        world.client.conversations.delete(kept),
        world.client.conversations.items.create(kept, items=[{"type": "message", "role": "user", "content": "a"}]),
        world.client.responses.create(model="tiny", input="a", conversation=kept),
        world.client.responses.create(model="tiny", input=reference),
    ):
        with pytest.raises(openai.NotFoundError):
            await ask
    for path in (f"/conversations/{kept}/export", f"/conversations/{kept}"):
        assert (await asked(world, "GET" if "export" in path else "DELETE", path))[0] == 404
    for query in ("", "?search=fox"):
        assert (await asked(world, "GET", f"/conversations{query}"))[1]["data"] == []
    _, page = await asked(world, "GET", "/conversations?deleted=true")
    assert [one["id"] for one in page["data"]] == [kept]
    assert (await asked(world, "POST", f"/conversations/{kept}/restore"))[0] == 200
    assert (await asked(world, "POST", f"/conversations/{kept}/restore"))[0] == 404
    assert (await world.client.conversations.items.list(kept)).data == [item]
    await asked(world, "DELETE", f"/conversations/{kept}")
    world.now += 30 * DAY + 1
    assert (await asked(world, "POST", f"/conversations/{kept}/restore"))[0] == 404
    assert await delete_expired(world.database, world.contents, world.now) == 1
    async with world.database.reading() as connection:
        assert (await connection.execute(items.select())).all() == []


async def test_feedback_is_given_changed_listed_and_deleted(world: StateWorld) -> None:
    made = await world.client.responses.create(model="tiny", input="the fox")
    path = f"/responses/{made.id}/feedback"
    assert (await asked(world, "GET", path))[0] == 404
    status, one = await asked(world, "POST", path, {"rating": "up", "text": "just right"})
    assert (status, one["rating"], one["text"], one["response_id"]) == (200, "up", "just right", made.id)
    world.now += 1
    _, changed = await asked(world, "POST", path, {"rating": "down"})
    assert changed == {**one, "rating": "down", "text": None}
    assert await asked(world, "GET", path) == (200, changed)
    for query, found in (("", [changed]), ("?rating=down", [changed]), ("?rating=up", [])):
        assert (await asked(world, "GET", f"/feedback{query}"))[1]["data"] == found
    assert (await asked(world, "DELETE", path))[1]["deleted"]
    assert (await asked(world, "GET", path))[0] == 404
    await asked(world, "POST", path, {"text": "again"})
    await world.client.responses.delete(made.id)  # erasure takes what was said of it, too
    assert (await asked(world, "GET", "/feedback"))[1]["data"] == []
    async with world.database.reading() as connection:
        assert (await connection.execute(objects.select())).all() == []


async def test_exports_are_lines_of_json(world: StateWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is stored of a conversation, or of a response with its feedback."""
    monkeypatch.setattr("orchestrator.api.exports.PAGE", 2)
    monkeypatch.setattr("orchestrator.api.exports.PIECE_BYTES", 100)
    talks = [await talk(world, f"question {number}") for number in range(3)]
    await world.client.responses.create(model="tiny", input="and now?", conversation=talks[0])
    _, [line] = await asked(world, "GET", f"/conversations/{talks[0]}/export")
    assert line["conversation"]["id"] == talks[0]
    assert [item["content"][0]["text"] for item in line["items"]] == ["question 0", "and now?", "Hello you"]
    _, lines = await asked(world, "GET", "/conversations/export")
    assert [one["conversation"]["id"] for one in lines] == talks
    made = [(await world.client.responses.create(model="tiny", input=f"q{number}")).id for number in range(6)]
    await asked(world, "POST", f"/responses/{made[1]}/feedback", {"rating": "up"})
    await asked(world, "POST", f"/responses/{made[4]}/feedback", {"rating": "down", "text": "no"})
    _, lines = await asked(world, "GET", "/responses/export")
    assert len(lines) == 7
    assert {one["response"]["id"] for one in lines} > set(made)
    for query, wanted in (("any", {made[1], made[4]}), ("down", {made[4]})):
        _, lines = await asked(world, "GET", f"/responses/export?feedback={query}")
        assert {one["response"]["id"] for one in lines} == wanted
    [line] = lines
    assert (line["feedback"]["text"], line["input"][0]["content"][0]["text"]) == ("no", "q4")
    assert line["response"]["output"][0]["content"][0]["text"] == "Hello you"
    status, error = await asked(world, "GET", "/responses/export?feedback=maybe")
    assert (status, error["error"]["param"]) == (400, "feedback")


async def test_history_and_feedback_are_their_tenants(world: StateWorld) -> None:
    """Another tenant finds, changes and exports nothing."""
    kept = await talk(world, "the fox")
    made = await world.client.responses.create(model="tiny", input="the fox")
    gone = await talk(world, "gone")
    await asked(world, "DELETE", f"/conversations/{gone}")
    await asked(world, "POST", f"/responses/{made.id}/feedback", {"rating": "up"})
    cases: list[tuple[str, str, str, Any]] = [
        ("POST", "/conversations/ID", kept, {"title": "mine"}),
        ("DELETE", "/conversations/ID", kept, None),
        ("POST", "/conversations/ID/restore", gone, None),
        ("GET", "/conversations/ID/export", kept, None),
        ("POST", "/responses/ID/feedback", made.id, {"rating": "down"}),
        ("GET", "/responses/ID/feedback", made.id, None),
        ("DELETE", "/responses/ID/feedback", made.id, None),
    ]
    for method, path, own, body in cases:
        foreign = await asked(world, method, path.replace("ID", own), body, of_other=True)
        unknown = await asked(world, method, path.replace("ID", own[:6] + "0" * 30), body, of_other=True)
        assert foreign[0] == unknown[0] == 404, path
        assert {**foreign[1]["error"], "message": ""} == {**unknown[1]["error"], "message": ""}
    for path in ("/conversations", "/conversations?deleted=true", "/conversations?search=fox", "/feedback"):
        assert (await asked(world, "GET", path, of_other=True))[1]["data"] == []
    for path in ("/conversations/export", "/responses/export"):
        assert await asked(world, "GET", path, of_other=True) == (200, [])
    assert (await asked(world, "GET", f"/responses/{made.id}/feedback"))[1]["rating"] == "up"
