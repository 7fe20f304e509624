"""Files that arrive in parts, as OpenAI's client uploads them, and files by Anthropic's client, on the same store."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from orchestrator.store.expiry import delete_expired, delete_orphans
from tests.fakes.state_world import StateWorld, state_world_on
from tests.lazy_imports import imported_when_used

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),  # the tests share their world
    pytest.mark.xdist_group("anthropic"),  # which takes seconds to import
]
anthropic: Any = imported_when_used("anthropic")

MAX_BYTES = 3 * 2**20
HOUR = 3600.0


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.long])],
)
async def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StateWorld]:
    async with state_world_on(request, tmp_path_factory, max_file_bytes=MAX_BYTES, max_files=4) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def claude(world: StateWorld) -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=world.edge.url, api_key=world.client.api_key, max_retries=0) as client:
        yield client


def contents_of(world: StateWorld) -> list[str]:
    assert world.contents._folder is not None
    return sorted(path.name for path in world.contents._folder.rglob("*") if path.is_file())


async def begun(world: StateWorld, num_bytes: int, **more: Any) -> str:
    made = await world.client.uploads.create(
        bytes=num_bytes, filename="a.txt", mime_type="text/plain", purpose="user_data", **more
    )
    assert (made.status, made.bytes, made.expires_at) == ("pending", num_bytes, made.created_at + HOUR)
    return made.id


async def test_parts_become_a_file(world: StateWorld, tmp_path: Path) -> None:
    """In the order that the client says. Repeated, it is the same file."""
    client = world.client
    first, second = b"a" * 700_000, b"b" * 10
    upload = await begun(world, len(first) + len(second), expires_after={"anchor": "created_at", "seconds": 3600})
    late = await client.uploads.parts.create(upload, data=second)
    early = await client.uploads.parts.create(upload, data=first)
    assert (late.upload_id, late.object) == (upload, "upload.part")
    md5 = hashlib.md5(first + second, usedforsecurity=False).hexdigest()
    done = await client.uploads.complete(upload, part_ids=[early.id, late.id], md5=md5)
    assert done.status == "completed"
    assert done.file is not None
    assert (await client.files.content(done.file.id)).content == first + second
    assert await client.files.retrieve(done.file.id) == done.file
    assert (done.file.filename, done.file.expires_at) == ("a.txt", done.file.created_at + 3600)
    assert await client.uploads.complete(upload, part_ids=[early.id, late.id]) == done
    assert contents_of(world) == [done.file.id]
    await client.files.delete(done.file.id)
    (tmp_path / "b.bin").write_bytes(first)
    whole = await client.uploads.upload_file_chunked(
        file=tmp_path / "b.bin", mime_type="application/octet-stream", purpose="user_data", part_size=300_000
    )
    assert whole.file is not None
    assert (await client.files.content(whole.file.id)).content == first
    await client.files.delete(whole.file.id)
    assert contents_of(world) == []


async def refused(call: Any) -> tuple[int, Any]:
    with pytest.raises(openai.APIStatusError) as caught:
        await call
    return caught.value.status_code, caught.value.param


async def test_what_does_not_fit_is_refused_and_leaves_nothing(world: StateWorld) -> None:
    parts, complete = world.client.uploads.parts.create, world.client.uploads.complete
    upload = await begun(world, 10)
    assert await refused(parts(upload, data=b"x" * 11)) == (413, "file")
    assert contents_of(world) == []
    part = await parts(upload, data=b"x" * 9)
    assert await refused(parts(upload, data=b"xx")) == (413, "file")
    for part_ids, found in (
        ([part.id], (400, "part_ids")),
        ([part.id, part.id], (400, "part_ids")),
        (["part_nothing"], (404, "part_ids")),
    ):
        assert await refused(complete(upload, part_ids=part_ids)) == found
    rest = await parts(upload, data=b"y")
    assert await refused(complete(upload, part_ids=[part.id, rest.id], md5="0" * 32)) == (400, "md5")
    assert len(contents_of(world)) == 2
    cancelled = await world.client.uploads.cancel(upload)
    assert (cancelled.status, cancelled.file) == ("cancelled", None)
    assert contents_of(world) == []
    for ask in (parts(upload, data=b"x"), complete(upload, part_ids=[part.id]), world.client.uploads.cancel(upload)):
        assert (await refused(ask))[0] == 409
    for body, field in (
        ({"bytes": MAX_BYTES + 1}, "bytes"),
        ({"bytes": 0}, "bytes"),
        ({"purpose": "fun"}, "purpose"),
        ({"filename": ""}, "file"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
    ):
        wanted: Any = {"bytes": 1, "filename": "a", "mime_type": "text/plain", "purpose": "user_data", **body}
        assert await refused(world.client.uploads.create(**wanted)) == (400, field)


async def test_an_upload_is_its_tenants_and_expires(world: StateWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that nobody completes takes no space after an hour."""
    upload = await begun(world, 3)
    part = await world.client.uploads.parts.create(upload, data=b"xyz")
    monkeypatch.setattr("orchestrator.files.contents.ORPHAN_SECONDS", -60.0)
    await delete_orphans(world.database, world.contents)
    assert contents_of(world) == [part.id]  # a part is no orphan
    for client, name in ((world.other, upload), (world.client, "upload_nothing")):
        assert await refused(client.uploads.parts.create(name, data=b"x")) == (404, None)
        assert await refused(client.uploads.complete(name, part_ids=[part.id])) == (404, None)
        assert await refused(client.uploads.cancel(name)) == (404, None)
    theirs = await world.other.uploads.create(bytes=3, filename="a", mime_type="text/plain", purpose="user_data")
    assert await refused(world.other.uploads.complete(theirs.id, part_ids=[part.id])) == (404, "part_ids")
    world.now += HOUR + 1
    assert await refused(world.client.uploads.complete(upload, part_ids=[part.id])) == (404, None)
    assert await delete_expired(world.database, world.contents, world.now) >= 2
    assert contents_of(world) == []


async def test_anthropics_client_has_the_same_files(world: StateWorld, claude: Any) -> None:
    """One store, in the shape of the API that asks."""
    made = await claude.files.upload(file=("a.txt", b"hello", "text/plain"), expires_in_seconds=7_776_000)
    assert (made.type, made.filename, made.mime_type, made.size_bytes) == ("file", "a.txt", "text/plain", 5)
    assert made.downloadable
    assert made.expires_at is not None
    assert (made.expires_at - made.created_at).days == 90
    assert await claude.files.retrieve_metadata(made.id) == made
    assert await (await claude.files.download(made.id)).read() == b"hello"
    assert (await world.client.files.retrieve(made.id)).purpose == "user_data"
    other = await world.client.files.create(file=("b.csv", b"1"), purpose="user_data")
    shown = await claude.files.retrieve_metadata(other.id)
    assert (shown.filename, shown.expires_at) == ("b.csv", None)
    world.now += 1
    third = await claude.files.upload(file=("folder/c.txt", b"x"))
    assert third.filename == "c.txt"
    assert {one.id async for one in claude.files.list(limit=1)} == {made.id, other.id, third.id}
    assert (await claude.files.list(limit=1)).data[0].id == third.id
    picked = await claude.files.list(ids=[other.id, "file_nothing", made.id])
    assert [one.id for one in picked.data] == [other.id, made.id]
    for one in (made, other, third):
        assert (await claude.files.delete(one.id)).type == "file_deleted"
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await claude.files.retrieve_metadata(made.id)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert contents_of(world) == []


async def test_anthropics_client_is_told_what_is_wrong(world: StateWorld, claude: Any) -> None:
    for ask in (
        claude.files.upload(file=("a.txt", b"x"), expires_in_seconds=60),
        claude.files.list(limit=1001),
        claude.files.list(page="nothing"),
        claude.files.list(page="page_nothing"),
        claude.files.list(ids=["a"], limit=3),
    ):
        with pytest.raises(anthropic.BadRequestError):
            await ask
    assert contents_of(world) == []
    async with anthropic.AsyncAnthropic(base_url=world.edge.url, api_key=world.other.api_key) as other:
        made = await claude.files.upload(file=("a.txt", b"x"))
        for refused_ask in (other.files.retrieve_metadata, other.files.delete, other.files.download):
            with pytest.raises(anthropic.NotFoundError):
                await refused_ask(made.id)
        assert [one async for one in other.files.list()] == []
        await claude.files.delete(made.id)
