"""Finishes the spools of routers that have died, or have stopped before control had all of their records.

What they had not forwarded is forwarded. Requests that ran when a router was killed get a record of how far they had
come. In the end control learns that the producer will send nothing more, so that it can close its leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import redis.asyncio
import redis.exceptions
import structlog

from kvloom_common.tenancy.usage_record import OUTCOME_VOID, UsageRecord
from kvloom_common.tenancy.usage_stream import UsageStream
from router.metering.forwarder import Forwarder
from router.metering.recent import read_recent
from router.metering.spool import Numbered, Spool, SpoolInUseError

log = structlog.get_logger()

T = TypeVar("T")

SCAN_SECONDS: Final = 2.0
MAX_AT_A_TIME: Final = 4


class Orphans:
    """`run` is its task. Routers that share a data directory may all look for spools: a lock decides."""

    def __init__(
        self,
        root: Path,
        own: Path,
        thread: Executor,
        client: redis.asyncio.Redis,
        stream: UsageStream,
        scan_seconds: float = SCAN_SECONDS,
    ) -> None:
        """`root` has a folder for each router, and these have one for each incarnation."""
        self._scan_seconds = scan_seconds
        self._root = root
        self._own = own
        self._thread = thread
        self._client = client
        self._stream = stream
        self._adopted: dict[Path, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._adopted = {folder: task for folder, task in self._adopted.items() if not task.done()}
                    for folder in await self._in_thread(self._find):
                        if len(self._adopted) < MAX_AT_A_TIME and folder not in self._adopted:
                            self._adopted[folder] = tasks.create_task(self._adopt(folder), name=f"spool {folder.name}")
                    await asyncio.sleep(self._scan_seconds)
        finally:
            self._adopted.clear()

    def _find(self) -> list[Path]:
        return sorted(folder for folder in self._root.glob("*/*") if folder.is_dir() and folder != self._own)

    async def _adopt(self, folder: Path) -> None:
        """Returns when the spool is finished, belongs to another process, or cannot be finished now."""
        spool = Spool(folder, max_bytes=2**62)
        try:
            await self._in_thread(spool.open)
        except SpoolInUseError:
            return
        except OSError as error:
            log.warning("orphaned_spool_open_failed", folder=str(folder), cause=str(error))
            return
        producer = f"{folder.parent.name}/{folder.name}"
        try:
            value = await self._client.hget(self._stream.stored, producer)
            stored = self._stream.read_stored(producer, value)
            last_number = await self._in_thread(lambda: finish(spool, stored.number))
            log.info("orphaned_spool_found", producer=producer, num_records=last_number - stored.number)
            forwarder = Forwarder(
                producer,
                self._client,
                self._stream,
                self._reader(spool, producer, last_number),
                _ignore,
                durable_number=lambda: last_number,
                closed_after=last_number,
            )
            await forwarder.run()
            await self._in_thread(spool.remove)
            await self._client.hdel(self._stream.stored, producer)
        except (redis.exceptions.RedisError, OSError) as error:
            log.warning("orphaned_spool_delayed", producer=producer, cause=type(error).__name__)
        finally:
            await asyncio.shield(self._in_thread(spool.close))

    def _reader(self, spool: Spool, producer: str, last_number: int) -> Callable[[int, int], Awaitable[list[Numbered]]]:
        async def read(from_number: int, max_records: int) -> list[Numbered]:
            found = await self._in_thread(lambda: spool.read(from_number, max_records))
            return without_gaps(found, producer, from_number, min(last_number, from_number + max_records - 1))

        return read

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


async def _ignore(_number: int) -> None:
    """The whole spool is deleted in the end."""


def finish(spool: Spool, stored_number: int) -> int:
    """Add the records of the requests that ran in the end. Returns the last number. May be repeated, after it has
    failed anywhere. Raises OSError."""
    after_number, running = spool.read_progress()
    last_number = max(stored_number, after_number)
    ended: set[tuple[str, str]] = set()
    spooled = 0
    for number, _ in spool.records():
        spooled = max(spooled, number)
    # What was not in the spool yet when the process was killed.
    recent = {number: payload for number, payload in read_recent(spool.folder) if number > max(spooled, stored_number)}
    spool.append(sorted(recent.items()))
    for number, payload in spool.records():
        last_number = max(last_number, number)
        if number > after_number:
            record = msgspec.json.decode(payload, type=UsageRecord)
            ended.add((record.request_id, record.answer_id))
    lost: list[Numbered] = []
    for payload in running:
        record = msgspec.json.decode(payload, type=UsageRecord)
        if (record.request_id, record.answer_id) not in ended:
            last_number += 1
            lost.append((last_number, msgspec.json.encode(msgspec.structs.replace(record, number=last_number))))
    spool.append(lost)
    spool.remove_progress()
    return last_number


def without_gaps(records: Sequence[Numbered], producer: str, first: int, last: int) -> list[Numbered]:
    """The records from `first` to `last`, of which some may be lost: nothing is known of those."""
    known = dict(records)
    if records and len(records) == last - first + 1:
        return list(records)
    return [
        (number, known.get(number) or msgspec.json.encode(_void(producer, number))) for number in range(first, last + 1)
    ]


def _void(producer: str, number: int) -> UsageRecord:
    return UsageRecord(producer, number, "", "", 0.0, "", outcome=OUTCOME_VOID)
