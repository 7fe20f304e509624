"""The logs of all machines of a fleet, in the order of time."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from tools.failures import CommandError
from tools.fleet.members import FleetAccess
from tools.fleet.view import Machine
from tools.supervisor.logs.entries import LiveMerge, LogEntry, RequestFilter, merged
from tools.supervisor.logs.files import LogQuery, LogReader, last_entries, log_paths

_POLL_SECONDS: Final = 0.2
_LOCAL_WINDOW_SECONDS: Final = 0.3
"""How long a new line waits for earlier lines of other processes: they write their lines within 20 ms."""
_FLEET_WINDOW_SECONDS: Final = 1.0
_MAX_WAITING_ENTRIES: Final = 10_000

Source = Callable[[LogQuery, bool], AsyncIterator[list[LogEntry] | None]]
"""Yields entries that exist, then None, then, if it is to follow, new ones."""


async def local_logs(fleet: FleetAccess, query: LogQuery, follow: bool) -> AsyncIterator[list[LogEntry] | None]:
    """From the files, so that they can be read when nothing runs any more."""
    paths = log_paths(fleet.folder.log_dir, fleet.config.fabric.name_prefix)
    reader = await asyncio.to_thread(LogReader, paths, query, follow=follow)
    try:
        yield await asyncio.to_thread(reader.first)
        yield None
        while follow:
            yield await asyncio.to_thread(reader.poll)
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        reader.close()


def remote_logs(fleet: FleetAccess, machine: Machine) -> Source:
    async def read(query: LogQuery, follow: bool) -> AsyncIterator[list[LogEntry] | None]:
        async with fleet.supervisor_of(machine) as supervisor:
            async for entries in supervisor.logs(query, follow=follow):
                yield entries

    return read


@dataclasses.dataclass
class FleetLogs:
    """Reads several sources. `problems` is called with what a source failed with; the others continue."""

    sources: Sequence[Source]
    on_problem: Callable[[str], None]

    async def last(self, query: LogQuery) -> list[LogEntry]:
        """Returns the lines that exist. A request that one machine knows by another id is found by both on all of
        them."""
        found = await self._all(query)
        if query.request_ids and len(self.sources) > 1:
            related = RequestFilter(*query.request_ids)
            for entry in itertools.chain(*found):
                related.learn(entry)
            if related.request_ids > set(query.request_ids):
                found = await self._all(dataclasses.replace(query, request_ids=tuple(related.request_ids)))
        return last_entries(merged(found), query.max_lines)

    async def _all(self, query: LogQuery) -> list[list[LogEntry]]:
        return list(await asyncio.gather(*(self._last_of(source, query) for source in self.sources)))

    async def _last_of(self, source: Source, query: LogQuery) -> list[LogEntry]:
        found: list[LogEntry] = []
        try:
            async for entries in source(query, False):
                found += entries or []
        except CommandError as error:
            self.on_problem(error.message)
        return found

    async def follow(self, query: LogQuery, show: Callable[[Sequence[LogEntry]], None]) -> None:
        """Shows what exists, and then new lines until cancelled."""
        window = _LOCAL_WINDOW_SECONDS if len(self.sources) == 1 else _FLEET_WINDOW_SECONDS
        merge = LiveMerge(window, _MAX_WAITING_ENTRIES)
        history: list[list[LogEntry]] = [[] for _ in self.sources]
        history_read = [asyncio.Event() for _ in self.sources]

        async def read(number: int, source: Source) -> None:
            is_history = True
            try:
                async for entries in source(query, True):
                    if entries is None:
                        is_history = False
                        history_read[number].set()
                    elif is_history:
                        history[number] += entries
                    else:
                        for entry in entries:
                            merge.add(entry, time.monotonic())
            except CommandError as error:
                self.on_problem(error.message)
            history_read[number].set()

        async with asyncio.TaskGroup() as tasks:
            for number, source in enumerate(self.sources):
                tasks.create_task(read(number, source))
            for event in history_read:
                await event.wait()
            show(last_entries(merged(history), query.max_lines))
            while True:
                show(list(merge.take(time.monotonic())))
                await asyncio.sleep(_POLL_SECONDS)
