"""Starts a set of processes in order, keeps them running, replaces them on request, and stops them in order."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from kvloom.backoff import Backoff
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
        self._log_dir = log_dir
        self._on_change = on_change
        self._on_event = on_event
        self._make_backoff = make_backoff
        self._stages = [[self._supervised(spec) for spec in stage] for stage in stages]
        self._keepers: dict[SupervisedProcess, asyncio.Task[None]] = {}
        self._keepers_changed = asyncio.Event()
        self._force = asyncio.Event()
        self.ended: list[ChildSpec] = []
        """The processes that have ended for good by themselves: shards that had notice, or were scaled in."""

    def _supervised(self, spec: ChildSpec) -> SupervisedProcess:
        return SupervisedProcess(
            spec,
            self._log_dir / f"{spec.name}.log",
            on_change=self._on_change,
            on_event=self._on_event,
            backoff=self._make_backoff(),
        )

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
            await self._start_together(stage)

    async def watch(self) -> None:
        """Never returns. Raises only if the supervisor itself fails."""
        while True:
            self._keepers_changed.clear()
            changed = asyncio.create_task(self._keepers_changed.wait(), name="keepers changed")
            keepers = list(self._keepers.values())
            try:
                await asyncio.wait((*keepers, changed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            await _all_or_first_failure([keeper for keeper in keepers if keeper.done()])
            for process in [process for process, keeper in self._keepers.items() if keeper.done()]:
                await self._forget_ended(process)

    async def add(self, specs: Sequence[ChildSpec]) -> None:
        """Start further processes, together. Raises ChildFailedError when one fails to start; then none of them is
        kept."""
        stage = [self._supervised(spec) for spec in specs]
        names = {spec.name for spec in specs}
        self.ended = [spec for spec in self.ended if spec.name not in names]
        self._stages.append(stage)
        try:
            await self._start_together(stage)
        except BaseException:
            await self.remove([process.spec.name for process in stage])
            raise

    async def remove(self, names: Sequence[str]) -> None:
        """Stop processes, together, and forget them."""
        leaving = [process for process in self._processes if process.spec.name in names]
        keepers = [self._keepers.pop(process) for process in leaving if process in self._keepers]
        self._keepers_changed.set()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await asyncio.gather(*(process.stop(self._force) for process in leaving))
        self._stages = [[process for process in stage if process not in leaving] for stage in self._stages]
        self._on_change()

    async def _forget_ended(self, process: SupervisedProcess) -> None:
        self.ended.append(process.spec)
        await self.remove([process.spec.name])
        self._on_event(f"{process.spec.name} has ended for good, as it had announced")

    def update_stop_timeouts(self, specs: Sequence[ChildSpec]) -> None:
        """Processes of these names may take as long to stop as these specs say, from their next start on."""
        timeouts = {spec.name: spec.stop_timeout_seconds for spec in specs}
        for process in self._processes:
            timeout_seconds = timeouts.get(process.spec.name, process.spec.stop_timeout_seconds)
            process.spec = dataclasses.replace(process.spec, stop_timeout_seconds=timeout_seconds)

    async def replace(self, name: str) -> None:
        """A planned restart of one process (see SupervisedProcess.replace). Raises ChildFailedError."""
        (process,) = (process for process in self._processes if process.spec.name == name)
        await process.replace(self._force)

    async def stop(self) -> None:
        """Stop all processes, role by role. May be called repeatedly."""
        for process in self._processes:
            process.close_port()
        keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        for role in self._stop_order:
            await asyncio.gather(*(p.stop(self._force) for p in self._processes if p.spec.role == role))

    def force_stop(self) -> None:
        """Have `stop`, whether it is running or called later, kill all processes at once."""
        self._force.set()

    @property
    def _processes(self) -> list[SupervisedProcess]:
        return [process for stage in self._stages for process in stage]

    async def _start_together(self, stage: Sequence[SupervisedProcess]) -> None:
        """Raises ChildFailedError as soon as one process fails to start."""
        starts = [asyncio.create_task(self._start_one(process)) for process in stage]
        try:
            await _all_or_first_failure(starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _start_one(self, process: SupervisedProcess) -> None:
        await process.start()
        status = process.status
        self._on_event(f"{status.name} is ready (pid {status.pid}{', ' + status.address if status.address else ''})")
        self._keepers[process] = asyncio.create_task(process.keep_running(), name=f"keep {status.name}")
        self._keepers_changed.set()


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
