"""What an administrator of one organisation can make control send, store and keep: all of it is bounded in bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Final

import pytest
import sqlalchemy as sa

from control.database.schema import keys, projects
from control.replication.follower import MAX_PART_BYTES
from control.replication.versions import read_state
from kvloom.v1.control_service_pb2 import FollowRequest, FollowResponse
from kvloom_common.tenancy.table import TenantTable
from tests.fakes.control_world import ControlWorld, Pb, control_world

NUM_KEYS: Final = 362
NUM_CHANGES: Final = 35
HUGE: Final = [f"{number:03}" + "\N{PILE OF POO}" * 253 for number in range(256)]
"""As many models, as long, as an entry could once have: 262 kB."""


@pytest.fixture
async def world(database_below_url: str) -> AsyncIterator[ControlWorld]:
    async with control_world(database_below_url) as world:
        yield world


async def _followed(world: ControlWorld, table: TenantTable) -> list[FollowResponse]:
    """Bring a table to the version of control. The channel takes no message above 4 MB, gRPC's default. Returns what
    arrived."""
    async with world.database.reading() as connection:
        version = (await read_state(connection)).version
    call = world.control.Follow(FollowRequest(table_id=table.table_id, version=table.version))
    parts = []
    async for response in call:
        table.apply(response)
        parts.append(response)
        if response.is_complete and response.version == version:
            break
    call.cancel()
    return parts


async def _huge_keys(world: ControlWorld, number: int) -> list[str]:
    """A database of an older version, which stored such keys."""
    made = await world.ask("CreateKey", key=Pb.ApiKey(project="acme/search"), create_project=True)
    async with world.database.writing() as connection:
        row = dict((await connection.execute(sa.select(keys))).mappings().one())
        rows = [
            {**row, "id": f"{one:016x}", "digest": one.to_bytes(32, "big"), "models": HUGE} for one in range(number)
        ]
        for one in rows:
            await connection.execute(sa.insert(keys).values(one))
        await connection.execute(sa.update(projects).values(models=HUGE))
    assert made.key.id
    return [one["id"] for one in rows]


async def _change(world: ControlWorld, ids: Sequence[str]) -> None:
    for key_id in ids:
        key = Pb.ApiKey(id=key_id, expires_at=world.now + 9.0)
        await world.ask("UpdateKey", key=key, update_mask={"paths": ["expires_at"]})


async def test_a_table_of_huge_entries_is_followed_in_small_parts(world: ControlWorld) -> None:
    """362 such keys made a part of 95 MB, above what gRPC takes: no edge or router could follow the table any more."""
    ids = await _huge_keys(world, NUM_KEYS)
    table = TenantTable()
    parts = await _followed(world, table)
    assert table.num_keys == NUM_KEYS + 1
    assert max(part.ByteSize() for part in parts) <= MAX_PART_BYTES
    await _change(world, ids[:NUM_CHANGES])
    parts = await _followed(world, table)
    assert not parts[0].begins_snapshot
    assert sum(len(part.keys) for part in parts) == NUM_CHANGES
    assert max(part.ByteSize() for part in parts) <= MAX_PART_BYTES


async def test_lists_of_huge_entries_come_in_small_pages(world: ControlWorld) -> None:
    """`GET /admin/v1/keys?page_size=1000` was answered with 503 once an organisation had some."""
    ids = await _huge_keys(world, 2 * NUM_CHANGES)
    await _change(world, ids[:NUM_CHANGES])
    found, token = [], ""
    while True:
        page = await world.ask("ListKeys", page_size=1000, page_token=token)
        found += [key.id for key in page.keys]
        if not (token := page.next_page_token):
            break
    assert len(found) == len(set(found)) == 2 * NUM_CHANGES + 1
    entries, token = 0, ""
    while True:
        page = await world.ask("ListAuditEntries", page_size=1000, page_token=token)
        entries += len(page.entries)
        if not (token := page.next_page_token):
            break
    assert entries == 3 + NUM_CHANGES
