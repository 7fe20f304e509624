"""Starts a set of processes in order, keeps them running, replaces them on request, and stops them in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from kvloom.process.backoff import Backoff
from tools.supervisor.child import ChildFailedError, ChildSpec
from tools.supervisor.supervised_process import ProcessStatus, SupervisedProcess, restart_backoff


class Supervisor:
    """The processes of each of the `stages` start together when the previous stage is ready. They stop role by role in
    the order of `stop_order`."""

    def __init__(
        self,
        stages: Sequence[Sequence[ChildSpec]],
        *,
        stop_order: Sequence[str],
        log_dir: Path,
        on_change: Callable[[], None],
        on_event: Callable[[str], None],
        make_backoff: Callable[[], Backoff] = restart_backoff,
    ) -> None:
        self._stop_order = stop_order
        self._on_event = on_event
        self._stages = [
            [
                SupervisedProcess(
                    spec,
                    log_dir / f"{spec.name}.log",
                    on_change=on_change,
                    on_event=on_event,
                    backoff=make_backoff(),
                )
                for spec in stage
            ]
            for stage in stages
        ]
        self._keepers: list[asyncio.Task[None]] = []
        self._force = asyncio.Event()

    @property
    def statuses(self) -> list[ProcessStatus]:
        """The status of all processes, including replaced ones that still run."""
        found = [(process.status, process.predecessor) for process in self._processes]
        return [status for pair in found for status in pair if status is not None]

    @property
    def all_ready(self) -> bool:
        return all(process.ready for process in self._processes)

    async def start(self) -> None:
        """Raises ChildFailedError as soon as one process fails to start. The others may still run (see `stop`)."""
        for stage in self._stages:
            starts = [asyncio.create_task(self._start_one(process)) for process in stage]
            try:
                await _all_or_first_failure(starts)
            finally:
                for start in starts:
                    start.cancel()
                await asyncio.gather(*starts, return_exceptions=True)

    async def watch(self) -> None:
        """Never returns. Raises only if the supervisor itself fails."""
        await _all_or_first_failure(self._keepers)

    async def replace(self, name: str) -> None:
        """A planned restart of one process (see SupervisedProcess.replace). Raises ChildFailedError."""
        (process,) = (process for process in self._processes if process.spec.name == name)
        await process.replace(self._force)

    async def stop(self) -> None:
        """Stop all processes, role by role. May be called repeatedly."""
        for process in self._processes:
            process.close_port()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for role in self._stop_order:
            await asyncio.gather(*(p.stop(self._force) for p in self._processes if p.spec.role == role))

    def force_stop(self) -> None:
        """Have `stop`, whether it is running or called later, kill all processes at once."""
        self._force.set()

    @property
    def _processes(self) -> list[SupervisedProcess]:
        return [process for stage in self._stages for process in stage]

    async def _start_one(self, process: SupervisedProcess) -> None:
        await process.start()
        status = process.status
        self._on_event(f"{status.name} is ready (pid {status.pid}{', ' + status.address if status.address else ''})")
        self._keepers.append(asyncio.create_task(process.keep_running(), name=f"keep {status.name}"))


async def _all_or_first_failure(tasks: Sequence[asyncio.Task[None]]) -> None:
    if not tasks:
        return
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    failures = [task.exception() for task in done if not task.cancelled()]
    for failure in failures:
        if isinstance(failure, ChildFailedError):
            raise failure
    for failure in failures:
        if failure is not None:
            raise failure
