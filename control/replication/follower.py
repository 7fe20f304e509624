"""Follower sends one follower the table: a snapshot in parts, and then changes.

No transaction outlasts a part, so that a slow follower holds nothing up. The parts of a snapshot are therefore read one
after another while the table changes; the last part has what has changed since the first, and only with it the snapshot
is that of a version. Changes are told in between as well: the follower still serves by the table that it had. A
follower that was slow gets all that it has missed as one set of changes, or another snapshot.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from control.directory.transaction import read_tiers
from control.replication.entries import read_keys, read_organisations, read_prices, read_tenants
from control.replication.versions import TableState, Versions, read_changes, read_state
from kvloom.v1.control_service_pb2 import FollowResponse, Price
from kvloom_common.database.database import Database

MAX_PART_ENTRIES: Final = 500
MAX_PART_BYTES: Final = 2**20
"""Both ends handle a part at once, and serve others between parts. Only an entry that is larger by itself, or the list
of all prices, makes a part that is larger."""
MAX_CHANGES_BYTES: Final = 64 * 2**20
"""One set of changes has at most so many bytes, as it is kept in memory as a whole. Beyond that the follower is sent a
snapshot."""
_MAX_ENTRIES_BYTES: Final = MAX_PART_BYTES - 2**10
"""The entries of a part have at most so many bytes, so that its other fields fit too."""
_FIELD_BYTES: Final = 8
"""The tag and the length of an entry in a part."""
_KINDS: Final[tuple[tuple[str, str, Any], ...]] = (
    ("organisation", "organisations", read_organisations),
    ("tenant", "tenants", read_tenants),
    ("key", "keys", read_keys),
)
"""In the log of changes, in a response, and in the database. Organisations come first: a key whose tenant is not
known is refused."""


class Follower:
    """`table_id` and `version`: what the follower has already; "" and 0: nothing."""

    def __init__(
        self,
        database: Database,
        versions: Versions,
        table_id: str,
        version: int,
        *,
        part_entries: int = MAX_PART_ENTRIES,
    ) -> None:
        self._database = database
        self._versions = versions
        self._table_id = table_id
        self._version = version
        self._part_entries = part_entries

    async def responses(self) -> AsyncIterator[FollowResponse]:
        """Ends once the versions are closed. The first one comes at once, also if nothing has changed: it tells the
        follower that its table is the present one."""
        is_first = True
        while not self._versions.is_closed:
            changed = self._versions.next_change()
            parts = await self._database.uninterrupted(self._changes(completes_snapshot=False))
            if parts is None:
                async for part in self._snapshot():
                    yield part
                is_first = False
                continue
            if is_first and not parts:
                yield self._part(is_complete=True)
            is_first = False
            for part in parts:
                yield part
                self._version = part.version
            if not parts:
                await self._versions.wait(changed)

    async def _snapshot(self) -> AsyncIterator[FollowResponse]:
        while True:
            state, prices = await self._database.uninterrupted(self._beginning())
            self._table_id, self._version = state.table_id, state.version
            told, changed = state.version, self._versions.next_change()
            yield self._part(begins_snapshot=True, prices=prices, has_prices=True)
            for _, field, read in _KINDS:
                after = ""
                while True:
                    entries = await self._database.uninterrupted(self._entries(read, after))
                    for some in _small_enough(entries):
                        yield self._part(**{field: some})
                    if changed.is_set():
                        changed = self._versions.next_change()
                        told, parts = await self._database.uninterrupted(self._changes_meanwhile(told))
                        for part in parts:
                            yield part
                    if len(entries) < self._part_entries:
                        break
                    after = entries[-1].id
            parts = await self._database.uninterrupted(self._changes(completes_snapshot=True))
            if parts is not None:
                for part in parts:
                    yield part
                self._version = parts[-1].version
                return

    async def _beginning(self) -> tuple[TableState, list[Price]]:
        async with self._database.reading() as connection:
            return await read_state(connection), await read_prices(connection)

    async def _entries(self, read: Any, after: str) -> Any:
        async with self._database.reading() as connection:
            return await read(connection, await read_tiers(connection), after=after, limit=self._part_entries)

    async def _changes(self, *, completes_snapshot: bool) -> list[FollowResponse] | None:
        """Returns the changes since the follower's version, in parts of which only the last one has the next version.
        None: that version is not known any more. With `completes_snapshot` there is at least one part."""
        async with self._database.reading() as connection:
            state = await read_state(connection)
            is_known = self._table_id == state.table_id and state.oldest_version <= self._version <= state.version
            if not is_known:
                return None
            if state.version == self._version and not completes_snapshot:
                return []
            changed = await read_changes(connection, self._version, state.version)
            parts: list[FollowResponse] = []
            num_bytes = 0
            async for fields in self._changed_fields(connection, changed):
                parts.append(self._part(**fields))
                num_bytes += parts[-1].ByteSize()
                if num_bytes > MAX_CHANGES_BYTES and not completes_snapshot:
                    return None
        for part in parts:
            part.is_complete = not completes_snapshot
        parts = parts or [self._part()]
        parts[-1].is_complete = True
        parts[-1].version = state.version
        return parts

    async def _changes_meanwhile(self, told: int) -> tuple[int, list[FollowResponse]]:
        """The version until which changes have been told now, and those since `told`. A large snapshot takes long, and
        a key that is revoked meanwhile must not be accepted until its end."""
        async with self._database.reading() as connection:
            state = await read_state(connection)
            if state.table_id != self._table_id or state.oldest_version > told:
                return told, []  # another snapshot will follow
            changed = await read_changes(connection, told, state.version)
            fields = self._changed_fields(connection, changed)
            return state.version, [self._part(holds_at_once=True, **one) async for one in fields]

    async def _changed_fields(
        self, connection: AsyncConnection, changed: Mapping[str, set[str]]
    ) -> AsyncIterator[dict[str, Any]]:
        tiers = await read_tiers(connection)
        if "prices" in changed:
            yield {"prices": await read_prices(connection), "has_prices": True}
        for kind, field, read in _KINDS:
            ids = sorted(changed.get(kind, ()))
            for first in range(0, len(ids), self._part_entries):
                some = ids[first : first + self._part_entries]
                entries = await read(connection, tiers, some)
                there = {entry.id for entry in entries}
                if removed := [one for one in some if one not in there]:
                    yield {f"removed_{field}": removed}
                for few in _small_enough(entries):
                    yield {field: few}

    def _part(self, **fields: Any) -> FollowResponse:
        return FollowResponse(table_id=self._table_id, version=self._version, **fields)


def _small_enough(entries: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The entries in lists of at most MAX_PART_BYTES, or of one entry."""
    some: list[Any] = []
    num_bytes = 0
    for entry in entries:
        size = entry.ByteSize() + _FIELD_BYTES
        if some and num_bytes + size > _MAX_ENTRIES_BYTES:
            yield some
            some, num_bytes = [], 0
        some.append(entry)
        num_bytes += size
    if some:
        yield some
