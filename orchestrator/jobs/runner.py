"""Finds jobs to do, and holds them, so that no other orchestrator does them as long as this one lives."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import structlog

from kvloom.errors import KvloomError
from kvloom_common.database.database import DATABASE_ERRORS, Database, database_error
from kvloom_common.process.cancellation import raise_if_cancelled
from orchestrator.jobs import claims

log = structlog.get_logger()

Clock = Callable[[], float]
"""Returns the seconds since 1970."""
HELD_SECONDS: Final = 15.0
"""How long another orchestrator leaves the jobs of one that was killed."""
PAUSE_SECONDS: Final = 1.0


class Work(Protocol):
    """The work at one job."""

    async def run(self) -> None:
        """Returns when the job is over. Raises KvloomError and what a database raises; another call continues."""
        ...

    async def look(self, now: float) -> None:
        """Called from time to time, to see whether the work must end early. Raises what a database raises."""
        ...


class JobKind(NamedTuple):
    """How jobs of a kind are done, and how many of them by one process."""

    make: Callable[[Any], Work]
    """Called with the job's row."""
    most: int


class JobRunner:
    """`run` must run while jobs are to be done."""

    def __init__(
        self,
        database: Database,
        kinds: Mapping[str, JobKind],
        name: str,
        clock: Clock = time.time,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        """`name`: this process's, which no other one has."""
        self._database = database
        self._kinds = kinds
        self._name = name
        self._clock = clock
        self._pause_seconds = pause_seconds
        self._woken = asyncio.Event()
        self._works: dict[str, tuple[Work, asyncio.Task[None], str]] = {}

    def wake(self) -> None:
        """There may be something to do at once."""
        self._woken.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                self._woken.clear()
                try:
                    await self._database.uninterrupted(self._turn())
                except DATABASE_ERRORS as error:
                    database_error("jobs", error)
                raise_if_cancelled()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_seconds):
                        await self._woken.wait()
        finally:
            tasks = [task for _, task, _ in self._works.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _turn(self) -> None:
        now = self._clock()
        self._works = {job_id: one for job_id, one in self._works.items() if not one[1].done()}
        if self._works:
            held = await claims.hold_on(self._database, self._name, list(self._works), now, HELD_SECONDS)
            for job_id, (work, task, _) in list(self._works.items()):
                if job_id in held:
                    await work.look(now)
                else:  # another one does it
                    task.cancel()
        for kind, (make, most) in self._kinds.items():
            room = most - sum(own == kind for _, _, own in self._works.values())
            if room <= 0:
                continue
            for job in await claims.claim(self._database, self._name, kind, now, HELD_SECONDS, room, list(self._works)):
                work = make(job)
                await work.look(now)
                self._works[job.id] = work, asyncio.create_task(self._attend(work, job), name=job.id), kind

    async def _attend(self, work: Work, job: Any) -> None:
        try:
            await work.run()
        except DATABASE_ERRORS as error:
            database_error("job", error)
        except KvloomError as error:
            log.warning("job_interrupted", job=job.id, cause=error.message)
        except Exception:
            log.exception("job_broke", job=job.id)
        else:
            self.wake()  # there is room for another one
