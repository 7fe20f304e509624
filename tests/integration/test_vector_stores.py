"""Vector stores, as OpenAI's client uses them, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import openai
import pytest
import pytest_asyncio
import sqlalchemy as sa
from openai.types import VectorStore

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState
from orchestrator.database.schema import jobs, store_chunks, store_files, vector_stores
from orchestrator.store.expiry import delete_expired
from tests.fakes.fake_encoder import ENCODER, WINDOW, embedding, encoder_info, encoder_model
from tests.fakes.fake_router_link import FakeRequest, answer
from tests.fakes.state_world import StateWorld, state_world_on
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests of a database share their world

DAY = 86_400.0
LOOM = "# Looms\n\nThe Jacquard loom reads punched cards.\n\n## Care\n\nOil the shuttle race every week.\n"
MILL = "The water mill grinds wheat. Its wheel turns in the river.\n"
PRICES = "name,price\nshuttle,12\nbobbin,3\n"


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.long])],
)
async def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StateWorld]:
    async with state_world_on(request, tmp_path_factory, more_models=[encoder_model()], max_vector_stores=4) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared: StateWorld) -> AsyncIterator[StateWorld]:
    link = shared.edge.link
    link.script = embedding(answer("Hello"))
    tiny = next(info for info in link.fleet.models if info.name == "tiny")
    link.tell(FleetState(models=[tiny, encoder_info()]))
    yield shared
    for client in (shared.client, shared.other):
        async for store in client.vector_stores.list():
            await client.vector_stores.delete(store.id)


async def uploaded(world: StateWorld, name: str, text: str | bytes) -> str:
    content = text.encode() if isinstance(text, str) else text
    return (await world.client.files.create(file=(name, content), purpose="assistants")).id


async def ended(world: StateWorld, store: str) -> VectorStore:
    async def found() -> VectorStore | None:
        now = await world.client.vector_stores.retrieve(store)
        return now if now.status == "completed" else None

    done = await eventually(found, "the end of indexing")
    assert done is not None
    return done


async def indexed(world: StateWorld, **files: str | bytes) -> VectorStore:
    """A store with these files; their names have an underscore for the dot."""
    ids = [await uploaded(world, name.replace("_", "."), text) for name, text in files.items()]
    made = await world.client.vector_stores.create(name="Manuals", file_ids=ids)
    async with world.jobs():
        return await ended(world, made.id)


async def names_found(world: StateWorld, store: str, query: str, **more: Any) -> list[str]:
    return [one.filename async for one in world.client.vector_stores.search(store, query=query, **more)]


async def refused(call: Awaitable[Any]) -> tuple[int, Any]:
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    return caught.value.status_code, caught.value.body["param"]


async def num_rows(world: StateWorld) -> list[int]:
    tables = (vector_stores, store_files, store_chunks, jobs)
    async with world.database.reading() as connection:
        return [await connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0 for table in tables]


async def test_files_are_indexed_and_found(world: StateWorld) -> None:
    """The whole life of a store: this is what retrieval is built on."""
    client = world.client
    store = await indexed(world, loom_md=LOOM, mill_txt=MILL, prices_csv=PRICES)
    assert (store.name, store.status, store.metadata) == ("Manuals", "completed", {})
    assert (store.file_counts.completed, store.file_counts.total) == (3, 3)
    assert store.usage_bytes > len(MILL)
    assert store.embedding_model == ENCODER
    assert (await names_found(world, store.id, "Who reads punched cards?"))[0] == "loom.md"
    results = [one async for one in client.vector_stores.search(store.id, query="the river wheel", max_num_results=2)]
    assert len(results) == 2
    assert results[0].filename == "mill.txt"
    assert results[0].content[0].text == MILL.strip()
    assert 1.0 >= results[0].score >= results[1].score > 0.0
    files = [one async for one in client.vector_stores.files.list(store.id, limit=1)]
    assert len(files) == 3
    assert {one.status for one in files} == {"completed"}
    content = await client.vector_stores.files.content(results[0].file_id, vector_store_id=store.id)
    assert [one.text for one in content.data] == [MILL.strip()]
    assert store.id in [one.id async for one in client.vector_stores.list(limit=1)]
    changed = await client.vector_stores.update(store.id, name="Books", metadata={"a": "b"})
    assert (changed.name, changed.metadata, changed.file_counts.total) == ("Books", {"a": "b"}, 3)
    gone = await client.vector_stores.files.delete(results[0].file_id, vector_store_id=store.id)
    assert (gone.id, gone.deleted) == (results[0].file_id, True)
    assert "mill.txt" not in await names_found(world, store.id, "the river wheel")
    assert (await client.files.retrieve(gone.id)).filename == "mill.txt", "it is still a file"
    assert (await client.vector_stores.delete(store.id)).deleted
    assert (await refused(client.vector_stores.retrieve(store.id)))[0] == 404
    assert await num_rows(world) == [0, 0, 0, 0]


async def test_attributes_filter_and_can_change(world: StateWorld) -> None:
    """Applications keep apart by attributes what each of their users may see."""
    client = world.client
    store = await client.vector_stores.create()
    made = {}
    for name, year in (("a.txt", 1804), ("b.txt", 2024)):
        file = await uploaded(world, name, f"A loom of {name}")
        made[name] = await client.vector_stores.files.create(
            store.id, file_id=file, attributes={"year": year, "kind": "loom", "is_old": year < 1900}
        )
    assert made["a.txt"].attributes == {"year": 1804, "kind": "loom", "is_old": True}
    async with world.jobs():
        await ended(world, store.id)
    for wanted, names in (
        ({"type": "gt", "key": "year", "value": 1900}, ["b.txt"]),
        ({"type": "eq", "key": "is_old", "value": True}, ["a.txt"]),
        ({"type": "in", "key": "year", "value": [1804, 5]}, ["a.txt"]),
        (
            {
                "type": "and",
                "filters": [
                    {"type": "eq", "key": "kind", "value": "loom"},
                    {"type": "or", "filters": [{"type": "lt", "key": "year", "value": 1}]},
                ],
            },
            [],
        ),
    ):
        assert await names_found(world, store.id, "loom", filters=wanted) == names
    file = made["a.txt"].id
    changed = await client.vector_stores.files.update(file, vector_store_id=store.id, attributes={"year": 1999})
    assert changed.attributes == {"year": 1999}
    assert await names_found(world, store.id, "loom", filters={"type": "eq", "key": "year", "value": 1999}) == ["a.txt"]
    assert await names_found(world, store.id, "loom", filters={"type": "eq", "key": "is_old", "value": True}) == []


async def test_rankings_and_thresholds(world: StateWorld) -> None:
    store = await indexed(world, loom_md=LOOM, mill_txt=MILL)
    search = world.client.vector_stores.search

    async def scores(**options: Any) -> list[float]:
        page = await search(store.id, query="The water mill grinds wheat", ranking_options=options)
        return [one.score for one in page.data]

    assert (await scores())[0] == 1.0
    assert await scores(score_threshold=1.0) == [1.0]
    cosines = await scores(ranker="none")
    assert cosines[0] > cosines[1]
    assert cosines[0] < 1.0
    by_words = await search(
        store.id,
        query="wheat",
        extra_body={"ranking_options": {"hybrid_search": {"embedding_weight": 0, "text_weight": 1}}},
    )
    assert [one.filename for one in by_words.data] == ["mill.txt"]
    both = await search(store.id, query=["punched cards", "wheat"])
    assert {one.filename for one in both.data} == {"loom.md", "mill.txt"}


async def test_what_cannot_be_read_fails_with_its_reason(world: StateWorld) -> None:
    store = await indexed(world, image_bin=b"\x89PNG\0\0", empty_txt=b" ", bad_json=b"{", mill_txt=MILL)
    assert (store.file_counts.failed, store.file_counts.completed) == (3, 1)
    files = [one async for one in world.client.vector_stores.files.list(store.id, filter="failed")]
    codes = {(await world.client.files.retrieve(one.id)).filename: one.last_error for one in files}
    assert {name: error.code for name, error in codes.items() if error is not None} == {
        "image.bin": "unsupported_file",
        "empty.txt": "invalid_file",
        "bad.json": "invalid_file",
    }
    assert await names_found(world, store.id, "wheat") == ["mill.txt"]


async def test_a_chunk_for_which_the_encoder_has_no_room_becomes_several(world: StateWorld) -> None:
    """Sizes in tokens are estimated; what is too long must not be lost, nor fail its file."""
    words = " ".join(f"zqx{number}" for number in range(400))
    store = await indexed(world, long_txt=words)
    assert store.file_counts.completed == 1
    [file] = [one async for one in world.client.vector_stores.files.list(store.id)]
    content = await world.client.vector_stores.files.content(file.id, vector_store_id=store.id)
    texts = [one.text or "" for one in content.data]
    assert set(" ".join(texts).split()) == set(words.split())
    tokenizer = world.edge.edge.models.by_name[ENCODER].tokenizer
    assert max([len(await tokenizer.encode(text)) for text in texts]) <= WINDOW


async def test_file_batches(world: StateWorld) -> None:
    """Some of a batch may be cancelled; what is done stays."""
    client = world.client
    store = await client.vector_stores.create()
    ids = [await uploaded(world, f"{number}.txt", f"loom {number}") for number in range(3)]
    batch = await client.vector_stores.file_batches.create(store.id, file_ids=ids[:2], attributes={"a": 1})
    assert (batch.status, batch.file_counts.in_progress, batch.file_counts.total) == ("in_progress", 2, 2)
    assert (await client.vector_stores.retrieve(store.id)).status == "in_progress"
    async with world.jobs():
        await ended(world, store.id)
    done = await client.vector_stores.file_batches.retrieve(batch.id, vector_store_id=store.id)
    assert (done.status, done.file_counts.completed) == ("completed", 2)
    listed = client.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id, order="asc", limit=1)
    files = [one async for one in listed]
    assert {one.id for one in files} == set(ids[:2])
    assert {one.attributes["a"] for one in files if one.attributes} == {1}
    second = await client.vector_stores.file_batches.create(
        store.id,
        files=[
            {
                "file_id": ids[2],
                "chunking_strategy": {
                    "type": "static",
                    "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 50},
                },
            }
        ],
    )
    cancelled = await client.vector_stores.file_batches.cancel(second.id, vector_store_id=store.id)
    assert (cancelled.status, cancelled.file_counts.cancelled) == ("cancelled", 1)
    [file] = (await client.vector_stores.files.list(store.id, filter="cancelled")).data
    strategy = file.chunking_strategy
    assert strategy is not None
    assert strategy.type == "static"
    assert strategy.static.max_chunk_size_tokens == 100
    assert (await refused(client.vector_stores.file_batches.cancel(batch.id, vector_store_id=store.id)))[0] == 409
    assert (await num_rows(world))[3] == 0


async def test_another_orchestrator_continues_and_an_encoder_that_is_away_is_waited_for(world: StateWorld) -> None:
    """Nothing that was acknowledged is lost, and nothing is indexed twice."""
    held: list[FakeRequest] = []
    world.edge.link.script = held.append
    store = await world.client.vector_stores.create(file_ids=[await uploaded(world, "mill.txt", MILL)])
    async with world.jobs("one"):
        await eventually(lambda: held, "a request that is held")
    for request in held:
        request.fail(ErrorReason.ERROR_REASON_SHARD_LOST)
    refusals = [True] * 2

    def script(request: FakeRequest) -> None:
        if refusals:
            refusals.pop()
            request.fail(ErrorReason.ERROR_REASON_QUEUE_FULL)
        else:
            embedding(answer("Hello"))(request)

    world.edge.link.script = script
    world.now += 60.0  # what the first one held is free
    async with world.jobs("two"):
        assert (await ended(world, store.id)).file_counts.completed == 1
    assert (await num_rows(world))[2] == 1
    world.edge.link.script = lambda request: request.fail(ErrorReason.ERROR_REASON_SHARD_LOST)
    with pytest.raises(openai.InternalServerError, match="at the moment"):
        await world.client.vector_stores.search(store.id, query="wheat")


async def test_without_an_encoder_the_error_names_the_field(world: StateWorld) -> None:
    client = world.client
    tiny = next(info for info in world.edge.link.fleet.models if info.name == "tiny")
    world.edge.link.tell(FleetState(models=[tiny]))
    assert await refused(client.vector_stores.create()) == (503, "embedding_model"), "its shards may be starting"
    chatty = encoder_info()
    chatty.capabilities.append("generate")
    world.edge.link.tell(FleetState(models=[tiny, chatty]))
    with pytest.raises(openai.BadRequestError, match="serves no encoder") as caught:
        await client.vector_stores.create()
    assert caught.value.body["param"] == "embedding_model"
    named = await client.vector_stores.create(extra_body={"embedding_model": ENCODER})
    assert named.embedding_model == ENCODER
    assert await refused(client.vector_stores.create(extra_body={"embedding_model": "none"})) == (
        404,
        "embedding_model",
    )


async def test_bad_requests_name_their_field(world: StateWorld) -> None:
    client = world.client
    store = await client.vector_stores.create()
    file = await uploaded(world, "a.txt", MILL)
    create, search = client.vector_stores.files.create, client.vector_stores.search

    def static(size: int, overlap: int) -> Any:
        return {"type": "static", "static": {"max_chunk_size_tokens": size, "chunk_overlap_tokens": overlap}}

    weights = {"ranking_options": {"hybrid_search": {"embedding_weight": 0, "text_weight": 0}}}
    cases: list[tuple[Awaitable[Any], tuple[int, str]]] = [
        (create(store.id, file_id="file-nothing"), (404, "file_id")),
        (
            create(store.id, file_id=file, chunking_strategy=static(99, 0)),
            (400, "chunking_strategy.static.max_chunk_size_tokens"),
        ),
        (
            create(store.id, file_id=file, chunking_strategy=static(100, 51)),
            (400, "chunking_strategy.static.chunk_overlap_tokens"),
        ),
        (create(store.id, file_id=file, attributes={str(n): 1 for n in range(17)}), (400, "attributes")),
        (client.vector_stores.file_batches.create(store.id), (400, "file_ids")),
        (
            client.vector_stores.create(expires_after={"anchor": "last_active_at", "days": 0}),
            (400, "expires_after.days"),
        ),
        (client.vector_stores.files.list(store.id, filter="done"), (400, "filter")),
        (client.vector_stores.files.list(store.id, before="file-nothing"), (400, "before")),
        (search(store.id, query=""), (400, "query")),
        (search(store.id, query="a", max_num_results=51), (400, "max_num_results")),
        (search(store.id, query="a", filters={"type": "eq", "key": "a"}), (400, "filters.value")),
        (search(store.id, query="a", extra_body=weights), (400, "ranking_options.hybrid_search")),
        (search(store.id, query="the fox " * 2000), (400, "query")),
    ]
    for call, expected in cases:
        assert await refused(call) == expected
    for _ in range(3):
        await client.vector_stores.create()
    with pytest.raises(openai.ConflictError, match="max_vector_stores"):
        await client.vector_stores.create()


async def test_other_tenants_find_nothing(world: StateWorld) -> None:
    """A store, its files and its batches are found by their tenant alone, and nobody can attach another's file."""
    store = await indexed(world, mill_txt=MILL)
    [file] = (await world.client.vector_stores.files.list(store.id)).data
    batch = await world.client.vector_stores.file_batches.create(store.id, file_ids=[file.id])
    other = world.other.vector_stores
    own = await other.create()
    asked: list[Awaitable[Any]] = [
        other.retrieve(store.id),
        other.update(store.id, name="x"),
        other.delete(store.id),
        other.search(store.id, query="wheat"),
        other.files.create(store.id, file_id=file.id),
        other.files.list(store.id),
        other.files.retrieve(file.id, vector_store_id=store.id),
        other.files.update(file.id, vector_store_id=store.id, attributes={}),
        other.files.delete(file.id, vector_store_id=store.id),
        other.files.content(file.id, vector_store_id=store.id),
        other.file_batches.create(store.id, file_ids=[file.id]),
        other.file_batches.retrieve(batch.id, vector_store_id=store.id),
        other.file_batches.cancel(batch.id, vector_store_id=store.id),
        other.file_batches.list_files(batch.id, vector_store_id=store.id),
        other.files.create(own.id, file_id=file.id),
        other.file_batches.retrieve(batch.id, vector_store_id=own.id),
        other.files.retrieve(file.id, vector_store_id=own.id),
    ]
    for call in asked:
        assert (await refused(call))[0] == 404
    assert [one.id async for one in other.list()] == [own.id]
    assert (await world.client.vector_stores.retrieve(store.id)).file_counts.total == 1


async def test_stores_expire_after_their_last_use_and_deleted_files_leave_them(world: StateWorld) -> None:
    """What a tenant deletes must not come back in an answer."""
    client = world.client
    store = await indexed(world, mill_txt=MILL, loom_md=LOOM)
    await client.vector_stores.update(store.id, expires_after={"anchor": "last_active_at", "days": 2})
    world.now += DAY
    [first, *_] = (await client.vector_stores.search(store.id, query="wheat")).data
    now = await client.vector_stores.retrieve(store.id)
    assert (now.last_active_at, now.expires_at) == (int(world.now), int(world.now + 2 * DAY))
    await client.files.delete(first.file_id)
    assert await names_found(world, store.id, "wheat") == ["loom.md"]
    assert (await client.vector_stores.retrieve(store.id)).file_counts.total == 1
    world.now += 2 * DAY + 1
    assert (await refused(client.vector_stores.search(store.id, query="wheat")))[0] == 404
    await delete_expired(world.database, world.contents, world.now)
    assert (await num_rows(world))[:3] == [0, 0, 0]


async def test_searches_at_the_same_time_see_what_is_complete(world: StateWorld) -> None:
    """A file is found as a whole, once it is completed, whatever else is searched and indexed meanwhile."""
    store = await indexed(world, mill_txt=MILL)
    for number in range(4):
        file = await uploaded(world, f"{number}.txt", f"wheat {number}")
        await world.client.vector_stores.files.create(store.id, file_id=file)
    async with world.jobs():
        while (await world.client.vector_stores.retrieve(store.id)).status != "completed":
            found = await asyncio.gather(*(names_found(world, store.id, "wheat") for _ in range(3)))
            assert all("mill.txt" in names for names in found)
    assert len(await names_found(world, store.id, "wheat")) == 5
