"""One process of the fabric, kept running: started, watched, reported and restarted when it dies."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import time
from collections.abc import Callable
from pathlib import Path

from kvloom.service import ReadyLine
from tools.backoff import Backoff
from tools.bounded_log import BoundedLog
from tools.child import Child, ChildFailedError, ChildSpec


class ProcessState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """It died; the next start waits for its back-off."""
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What `kvloom status` shows of one process."""

    role: str
    name: str
    pid: int | None
    """None while it does not run."""
    state: str
    restarts: int = 0
    address: str = ""
    metrics_address: str = ""


class SupervisedProcess:
    """Runs one ChildSpec. `on_change` is called after every change of `status`, `on_event` with one line for people."""

    def __init__(
        self,
        spec: ChildSpec,
        log_path: Path,
        *,
        on_change: Callable[[], None],
        on_event: Callable[[str], None],
        backoff: Backoff | None = None,
    ) -> None:
        self.spec = spec
        self._log = BoundedLog(log_path)
        self._on_change = on_change
        self._on_event = on_event
        self._backoff = backoff or Backoff()
        self._child: Child | None = None
        self._state = ProcessState.STOPPED
        self._ready = ReadyLine(address="")
        self._restarts = 0

    @property
    def status(self) -> ProcessStatus:
        child = self._child
        return ProcessStatus(
            role=self.spec.role,
            name=self.spec.name,
            pid=child.pid if child is not None and child.running else None,
            state=self._state.value,
            restarts=self._restarts,
            address=self._ready.address,
            metrics_address=self._ready.metrics_address,
        )

    @property
    def ready(self) -> bool:
        return self._state is ProcessState.READY and self._child is not None and self._child.running

    async def start(self) -> None:
        """Launch and wait until it serves. Raises ChildFailedError; the child may then still run (see `stop`)."""
        self._enter(ProcessState.STARTING)
        self._child = None
        try:
            self._child = Child(self.spec, self._log)
        except OSError as error:
            raise ChildFailedError(f"{self.spec.name} could not be launched: {error}") from error
        self._on_change()
        self._ready = await self._child.wait_ready()
        self._enter(ProcessState.READY)

    async def keep_running(self) -> None:
        """Never returns: waits for the process to die, reports, backs off, starts it again."""
        while True:
            child = self._child
            assert child is not None, "keep_running comes after start"
            started = time.monotonic()
            await child.wait_exit()
            await self._restart(await child.obituary(), ran_seconds=time.monotonic() - started)

    async def _restart(self, reason: str, ran_seconds: float) -> None:
        while True:
            delay = self._backoff.next_delay_seconds(ran_seconds)
            self._restarts += 1
            self._enter(ProcessState.RESTARTING)
            self._on_event(f"{reason}\n  restarting {self.spec.name} in {delay:.1f} s")
            await asyncio.sleep(delay)
            try:
                await self.start()
            except ChildFailedError as error:
                reason, ran_seconds = str(error), 0.0
                # One that hangs in its start still runs: it must go before the next try.
                if self._child is not None:
                    await self._child.kill()
            else:
                self._on_event(f"{self.spec.name} is back (pid {self.status.pid})")
                return

    async def stop(self, force: asyncio.Event) -> None:
        """End it (see Child.terminate). `keep_running` must have been cancelled. Repeatable."""
        if self._child is not None and self._state is not ProcessState.STOPPED:
            self._enter(ProcessState.STOPPING)
            await self._child.terminate(force)
        self._enter(ProcessState.STOPPED)
        self._log.close()

    def _enter(self, state: ProcessState) -> None:
        if state is not self._state:
            self._state = state
            self._on_change()
