"""What is erased is nowhere any more, and what is too old is deleted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import sqlalchemy as sa

from kvloom_common.audit.log import KEYS, AuditLog, read_log
from orchestrator.database.schema import store_chunks, store_files
from orchestrator.store import objects
from orchestrator.store.expiry import delete_old
from orchestrator.store.objects import StoredObject
from tests.fakes.edge_peers import edges
from tests.fakes.edge_world import chat_body
from tests.fakes.fake_control import OTHER_KEY, SEARCH_KEY
from tests.fakes.fake_router_link import answer
from tests.fakes.resume_world import client
from tests.fakes.state_world import ADMIN_KEY, StateWorld, state_world
from tests.waiting import eventually

TENANT = "acme/search"
TENANTS, KINDS = (TENANT, "other/app"), ("conversation", "conversation")
USER, OTHER_USER = "user-4711", "user-0815"
SAID, OTHERS = "wefts and warps", "bobbins and shuttles"
DAY = 86_400.0


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[StateWorld]:
    async with state_world(f"sqlite:///{tmp_path}/state.db", tmp_path, retention_days=30) as started:
        started.audit_dir = str(tmp_path / "audit")
        yield started


async def asked(world: StateWorld, method: str, path: str, body: Any = None, key: str = ADMIN_KEY) -> tuple[int, Any]:
    url, headers = f"{world.edge.url}/kvloom/v1{path}", {"Authorization": f"Bearer {key}"}
    async with world.edge.http.request(method, url, json=body, headers=headers) as response:
        return response.status, await response.json()


async def erased(world: StateWorld, key: str = ADMIN_KEY, **body: Any) -> dict[str, Any]:
    """The record of an erasure that has ended."""
    status, made = await asked(world, "POST", "/erasures", body, key)
    assert (status, made.get("status")) == (200, "in_progress"), made
    return await ended(world, made["id"], key)


async def ended(world: StateWorld, erasure: str, key: str = ADMIN_KEY) -> dict[str, Any]:
    async with world.jobs():

        async def record() -> Any:
            _, found = await asked(world, "GET", f"/erasures/{erasure}", key=key)
            return found["status"] == "completed" and found

        return await eventually(record, "the end of the erasure")


def on_disk(folder: Path, *, but: str = "audit") -> bytes:
    """All that is in the files of a folder."""
    paths = [path for path in folder.rglob("*") if path.is_file() and but not in path.parts]
    return b"".join(path.read_bytes() for path in sorted(paths))


async def leave_traces(world: StateWorld, user: str, said: str, audit: AuditLog) -> None:
    """Everything that a user can have stored."""
    api = world.client
    named: Any = {"safety_identifier": user}
    world.edge.link.script = answer("You ask about ", said)
    talk = await api.conversations.create(items=[{"role": "user", "content": f"{said} at first"}])
    more: Any = {"model": "tiny", "input": f"Tell me of {said}", **named}
    made = await api.responses.create(**more)
    await api.responses.create(**more, previous_response_id=made.id)
    await api.responses.create(**more, conversation=talk.id)
    await asked(world, "POST", f"/responses/{made.id}/feedback", {"text": f"{said}!"}, SEARCH_KEY)
    messages: Any = [{"role": "user", "content": said}]
    await api.chat.completions.create(model="tiny", messages=messages, store=True, **named)
    removed = await api.conversations.create(items=messages, metadata=named)
    await asked(world, "DELETE", f"/conversations/{removed.id}", key=SEARCH_KEY)
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "tiny"}}
    line["body"] |= {"messages": messages}
    file = await api.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = await api.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata=named
    )
    begun = await api.responses.create(**more, background=True)
    async with world.jobs():

        async def is_over() -> bool:
            response, ended = await api.responses.retrieve(begun.id), await api.batches.retrieve(batch.id)
            return (response.status, ended.status) == ("completed", "completed")

        await eventually(is_over, "the end of the jobs")
    await api.responses.create(**more, background=True)  # it is queued when it is erased
    audit.append("blocked", said, tenant=TENANT, safety_identifier=user)


async def index(world: StateWorld, said: str) -> None:
    """A vector store with a file, as one that has been indexed."""
    file = await world.client.files.create(file=("a.txt", said.encode()), purpose="assistants")
    async with world.database.writing() as connection:
        one = StoredObject("vs_1", world.now, None, "", "", {"name": said})
        await objects.add(connection, TENANT, "vector_store", one)
        whose = {"store": "vs_1", "file": file.id}
        row = {**whose, "tenant": TENANT, "created_at": 0.0, "batch": "", "status": "completed", "usage_bytes": 1}
        await connection.execute(store_files.insert().values(**row, version=1, body=b"{}"))
        await connection.execute(store_chunks.insert().values(**whose, position=0, text=said, vector=said.encode()))


async def test_nothing_on_disk_has_what_was_erased(world: StateWorld, tmp_path: Path) -> None:
    """Neither the database, nor its log, nor the files, nor the audit log's excerpts, first of one user, then of all.
    The record says how much it was, and names the user by a digest alone."""
    audit = AuditLog(tmp_path / "audit", "safety-0")
    await leave_traces(world, USER, SAID, audit)
    world.edge.link.script = answer("You ask about ", OTHERS)
    await world.client.responses.create(model="tiny", input=OTHERS, safety_identifier=OTHER_USER)
    audit.append("blocked", OTHERS, tenant=TENANT, safety_identifier=OTHER_USER)
    await index(world, OTHERS)
    assert {name.encode() in on_disk(tmp_path) for name in (USER, SAID, OTHER_USER, OTHERS)} == {True}
    record = await erased(world, safety_identifier=USER)
    kinds = {"batch": 1, "chat_completion": 1, "conversation": 1, "deleted_conversation": 1, "feedback": 1, "file": 2}
    kinds |= {"generation": 2}
    assert record["counts"] == {**kinds, "response": 5, "audit_keys": 1}
    assert record["safety_identifier_sha256"] == hashlib.sha256(USER.encode()).hexdigest()
    left = on_disk(tmp_path)
    assert [name.encode() in left for name in (USER, SAID, OTHER_USER, OTHERS)] == [False, False, True, True]
    lines = [line.record for line in read_log(tmp_path / "audit")]
    read = [audit.keys.open(one.excerpt, TENANT, one.day, one.safety_identifier) for one in lines if one.excerpt]
    assert sorted(map(str, read)) == ["None", OTHERS]
    record = await erased(world)
    assert record["counts"] == {"audit_keys": 1, "file": 1, "generation": 1, "response": 1, "vector_store": 1}
    assert {name.encode() in on_disk(tmp_path) for name in (USER, SAID, OTHER_USER, OTHERS)} == {False}
    assert list((tmp_path / "audit" / KEYS).iterdir()) == []
    async with world.database.reading() as connection:
        assert await connection.scalar(sa.select(sa.func.count()).select_from(store_chunks)) == 0
    _, page = await asked(world, "GET", "/erasures")
    assert [one["safety_identifier_sha256"] for one in page["data"]].count(None) == 1
    audit.close()


@pytest.mark.long  # it waits for that time, and for what edges give clients besides
async def test_redis_forgets_a_resumable_answer_after_its_grace_period(redis_url: str) -> None:
    """It is the one place besides the data directory that has words of clients, and it needs no erasure."""
    async with edges(redis_url, 1, grace_seconds=0.3) as [(world, _)], redis.asyncio.from_url(redis_url) as connection:

        async def has(*, wanted: bool) -> bool:
            dumps = [await connection.dump(key) or b"" async for key in connection.scan_iter("edge-resume-*")]
            return (SAID.encode() in b"".join(dumps)) == wanted

        world.link.script = answer("You ask about ", SAID)
        await client(world).begin(chat_body(stream=True))
        await eventually(lambda: has(wanted=True), "the journal")
        await eventually(lambda: has(wanted=False), "the end of its time")


async def test_an_erasure_concerns_whom_its_key_administers(world: StateWorld) -> None:
    """An ordinary key erases nothing. An administrator names tenants of its organisation; another's objects stay."""
    world.edge.link.script = answer("hello")
    kept = await world.other.responses.create(model="tiny", input="hello")
    assert (await asked(world, "POST", "/erasures", {}, SEARCH_KEY))[0] == 403
    status, error = await asked(world, "POST", "/erasures?tenant=other/app", {"tenant": "other/app"})
    assert (status, error["error"]["param"]) == (403, "tenant")
    record = await erased(world, tenant="acme/maps")
    assert (record["tenant"], record["counts"]) == ("acme/maps", {})
    assert (await erased(world, safety_identifier="nobody"))["counts"] == {}
    assert (await asked(world, "GET", f"/erasures/{record['id']}", key=OTHER_KEY))[0] == 403
    assert (await world.other.responses.retrieve(kept.id)).id == kept.id


async def test_an_erasure_that_is_taken_over_erases_nobody_else(world: StateWorld) -> None:
    """The process before died when the user's objects, and with them the user's name in the record, were gone. The next
    one took a record without a name for one of the whole tenant."""
    world.edge.link.script = answer("hello")
    kept = await world.client.responses.create(model="tiny", input="hello", safety_identifier=OTHER_USER)
    _, made = await asked(world, "POST", "/erasures", {"safety_identifier": USER})
    async with world.database.writing() as connection:
        one = await objects.get(connection, TENANT, "erasure", made["id"], world.now)
        await objects.change(connection, TENANT, one.id, {**one.body, "user": None})
    assert (await ended(world, made["id"]))["counts"] == {}
    assert (await world.client.responses.retrieve(kept.id)).id == kept.id


async def test_what_is_too_old_is_deleted(world: StateWorld) -> None:
    """As its tenant wants it, which is bounded by the operator. Another tenant's stays as long as the operator says."""
    assert await asked(world, "GET", "/retention") == (200, {"object": "retention", "days": None, "max_days": 30})
    status, error = await asked(world, "POST", "/retention", {"days": 31})
    assert (status, error["error"]["param"]) == (400, "days")
    assert (await asked(world, "POST", "/retention", {"days": 7}, SEARCH_KEY))[0] == 403
    assert (await asked(world, "POST", "/retention", {"days": 7}))[1]["days"] == 7
    talks = [(await api.conversations.create()).id for api in (world.client, world.other)]
    file = await world.client.files.create(file=("a.txt", b"hello"), purpose="assistants")

    async def deleted(days: float) -> int:
        return await delete_old(world.database, world.contents, 30, world.now + days * DAY)

    assert await deleted(6.9) == 0
    assert await deleted(7.1) == 2
    async with world.database.reading() as connection:
        left = [await objects.find(connection, *whose, world.now) for whose in zip(TENANTS, KINDS, talks, strict=True)]
    assert [one is not None for one in left] == [False, True]
    with pytest.raises(Exception, match="lost"):
        [piece async for piece in world.contents.read(file.id)]
    assert await deleted(29.9) == 0
    assert await deleted(30.1) == 1
    assert (await asked(world, "POST", "/retention", {"days": None}))[1]["days"] is None
    await world.client.conversations.create()
    assert await deleted(29.9) == 0
