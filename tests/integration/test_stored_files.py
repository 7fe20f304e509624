"""Files, as OpenAI's client uploads and reads them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from orchestrator.store.expiry import delete_expired, delete_orphans
from tests.fakes.state_world import StateWorld, state_world
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share their world

MAX_BYTES = 3 * 2**20
DAY = 86_400.0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StateWorld]:
    folder = tmp_path_factory.mktemp("files")
    async with state_world(f"sqlite:///{folder}/state.db", folder, max_file_bytes=MAX_BYTES, max_files=4) as started:
        yield started


def contents_of(world: StateWorld) -> list[Path]:
    assert world.contents._folder is not None
    return sorted(path for path in world.contents._folder.rglob("*") if path.is_file())


async def test_a_file_is_uploaded_listed_read_and_deleted(world: StateWorld) -> None:
    client = world.client
    text = bytes(range(256)) * 8192  # 2 MiB: several pieces
    made = await client.files.create(file=("a.bin", text), purpose="user_data")
    assert (made.bytes, made.filename, made.purpose, made.expires_at) == (len(text), "a.bin", "user_data", None)
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == text
    batch = await client.files.create(file=("b.jsonl", b"{}\n"), purpose="batch")
    assert batch.expires_at == batch.created_at + 30 * DAY
    kept = await client.files.create(
        file=("c.txt", b""), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert kept.expires_at == kept.created_at + 3600
    assert {one.id async for one in client.files.list(limit=2)} == {made.id, batch.id, kept.id}
    assert [one.id async for one in client.files.list(purpose="batch")] == [batch.id]
    assert len(contents_of(world)) == 3
    for one in (made, batch, kept):
        assert (await client.files.delete(one.id)).deleted
    assert [one async for one in client.files.list()] == []
    assert contents_of(world) == []


async def test_other_tenants_find_no_file(world: StateWorld) -> None:
    made = await world.client.files.create(file=("a.txt", b"secret"), purpose="user_data")
    for ask in (world.other.files.retrieve, world.other.files.content, world.other.files.delete):
        with pytest.raises(openai.NotFoundError) as foreign:
            await ask(made.id)
        with pytest.raises(openai.NotFoundError) as unknown:
            await ask("file-nothing")
        assert {**foreign.value.body, "message": ""} == {**unknown.value.body, "message": ""}
    assert [one async for one in world.other.files.list()] == []
    assert (await world.client.files.content(made.id)).content == b"secret"
    await world.client.files.delete(made.id)


async def test_limits_and_bad_forms_are_named(world: StateWorld) -> None:
    """What is refused leaves nothing behind."""
    client = world.client
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"file": b"x" * (MAX_BYTES + 1), "purpose": "user_data"}, 413, "file"),
        ({"file": b"x", "purpose": "fun"}, 400, "purpose"),
        ({"file": b"x"}, 400, "purpose"),
        ({"purpose": "user_data"}, 400, "file"),
        ({"file": b"x", "purpose": "batch", "expires_after[seconds]": "60"}, 400, "expires_after[seconds]"),
        ({"file": b"x", "purpose": "batch", "expires_after[seconds]": "soon"}, 400, "expires_after[seconds]"),
        ({"file": b"x", "purpose": "batch", "expires_after[anchor]": "now"}, 400, "expires_after[anchor]"),
    ]
    headers = {"Authorization": f"Bearer {client.api_key}"}
    for fields, status, field in cases:
        form = aiohttp.FormData(default_to_multipart=True)
        for name, value in fields.items():
            form.add_field(
                name, io.BytesIO(value) if name == "file" else value, **({"filename": "a"} if name == "file" else {})
            )
        async with world.edge.http.post(f"{world.edge.url}/v1/files", data=form, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (status, field)
    made = [await client.files.create(file=("a", b"x"), purpose="user_data") for _ in range(4)]
    with pytest.raises(openai.ConflictError, match="max_files"):
        await client.files.create(file=("a", b"x"), purpose="user_data")
    assert len(contents_of(world)) == 4
    for one in made:
        await client.files.delete(one.id)
    assert contents_of(world) == []


async def test_a_broken_upload_leaves_nothing(world: StateWorld) -> None:
    """A client that goes away in the middle has no file."""
    host, port = world.edge.address
    _, writer = await asyncio.open_connection(host, port)
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
        f"Authorization: Bearer {world.client.api_key}\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
        '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    )
    writer.write(head.encode() + b"x" * 500_000)
    await writer.drain()
    writer.close()
    await world.edge.edge.admission.wait_idle()
    await eventually(lambda: not contents_of(world), "the end of the upload")
    assert [one async for one in world.client.files.list()] == []


async def test_expired_files_and_orphans_are_deleted(world: StateWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be killed between a content and its row."""
    made = await world.client.files.create(file=("a.jsonl", b"x"), purpose="batch")
    world.now += 31 * DAY
    with pytest.raises(openai.NotFoundError):
        await world.client.files.retrieve(made.id)
    assert await delete_expired(world.database, world.contents, world.now) == 1
    assert contents_of(world) == []
    kept = await world.client.files.create(file=("a.jsonl", b"x"), purpose="batch")

    async def pieces() -> AsyncIterator[bytes]:
        yield b"lost"

    await world.contents.write("file-orphan", pieces())
    monkeypatch.setattr("orchestrator.files.contents.ORPHAN_SECONDS", -60.0)
    await delete_orphans(world.database, world.contents)
    assert [path.name for path in contents_of(world)] == [kept.id]
