"""One process of the fabric, kept running: started, watched, reported, restarted when it dies, replaced on demand."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import socket
import time
from collections.abc import Callable
from pathlib import Path

from kvloom.process.backoff import Backoff
from kvloom.process.service import ReadyLine
from tools.supervisor.bounded_log import BoundedLog
from tools.supervisor.child import Child, ChildFailedError, ChildSpec


def restart_backoff() -> Backoff:
    """The delays before one process is restarted. They start again once a run has lasted for 30 seconds."""
    return Backoff(0.2, max_seconds=15.0, stable_seconds=30.0)


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
    router_address: str = ""
    """Of the router that it is, or has inside."""
    router_metrics_address: str = ""


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
        self._backoff = backoff or restart_backoff()
        self._child: Child | None = None
        self._state = ProcessState.STOPPED
        self._listener: socket.socket | None = None
        """Passed on to a successor, so that connections which wait in it are not lost; closed when the process dies, so
        that its siblings get those to come."""
        self._leaving: tuple[Child, asyncio.Task[None]] | None = None
        """The predecessor, while it finishes what runs."""
        self._replacement: asyncio.Future[None] | None = None
        """Asked for, not yet begun by `keep_running`."""
        self._asked = asyncio.Event()
        self._force = asyncio.Event()
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
            router_address=self._ready.address if self.spec.role == "router" else self._ready.router_address,
            router_metrics_address=self._ready.router_metrics_address,
        )

    @property
    def predecessor(self) -> ProcessStatus | None:
        """The one that this one has replaced, as long as it still runs."""
        if self._leaving is None or not self._leaving[0].running:
            return None
        return ProcessStatus(self.spec.role, self.spec.name, self._leaving[0].pid, ProcessState.STOPPING.value)

    @property
    def ready(self) -> bool:
        return self._state is ProcessState.READY and self._child is not None and self._child.running

    async def start(self) -> None:
        """Launch and wait until it serves. Raises ChildFailedError; the child may then still run (see `stop`)."""
        self._enter(ProcessState.STARTING)
        self._child = None
        self._child = self._launch()
        self._on_change()
        self._ready = await self._child.wait_ready()
        self._enter(ProcessState.READY)

    async def keep_running(self) -> None:
        """Never returns: waits for the process to die, reports, backs off, starts it again; or replaces it."""
        while True:
            child = self._child
            assert child is not None, "keep_running comes after start"
            started = time.monotonic()
            if await self._exits_before_it_is_replaced(child):
                self.close_port()
                await self._restart(await child.obituary(), ran_seconds=time.monotonic() - started)
            elif self._replacement is not None:
                await self._carry_out(self._replacement)

    async def replace(self, force: asyncio.Event) -> None:
        """A planned restart, carried out by `keep_running`: a successor serves before this process ends if the spec
        allows it. Returns when the predecessor has gone, at once if `force` is set. Raises ChildFailedError when the
        successor does not come up; then the old process goes on, or is started anew until it works."""
        if not self.ready or self._replacement is not None:
            raise ChildFailedError(f"{self.spec.name} is not running steadily ({self._state.value})")
        await self._ask_for_successor(force)
        if self._leaving is not None:
            await asyncio.shield(self._leaving[1])

    def _ask_for_successor(self, force: asyncio.Event) -> asyncio.Future[None]:
        self._replacement = asyncio.get_running_loop().create_future()
        self._force = force
        self._asked.set()
        return self._replacement

    def _on_leaving(self, child: Child) -> None:
        """Its socket would collect connections until it has ended. When it was not this supervisor who told it to stop,
        others take them from now on: its siblings or, if it has none, a successor."""
        if child is not self._child or not self.ready or self._replacement is not None:
            return
        self._restarts += 1
        self._on_event(f"{self.spec.name} was told to stop: another one takes its place")
        if self.spec.listens_on is not None and self.spec.listens_on.is_served(besides=self._listener):
            self.close_port()
        self._ask_for_successor(asyncio.Event()).add_done_callback(self._on_successor)

    def _on_successor(self, started: asyncio.Future[None]) -> None:
        if started.exception() is None:
            self._tell_that_it_is_back()

    async def _restart(self, reason: str, ran_seconds: float) -> None:
        while True:
            delay = self._backoff.next_seconds(ran_seconds)
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
                self._tell_that_it_is_back()
                return

    def _tell_that_it_is_back(self) -> None:
        self._on_event(f"{self.spec.name} is back (pid {self.status.pid})")

    async def stop(self, force: asyncio.Event) -> None:
        """End it (see Child.terminate). `keep_running` must have been cancelled. Repeatable."""
        self.close_port()
        if self._child is not None and self._state is not ProcessState.STOPPED:
            self._enter(ProcessState.STOPPING)
            await self._child.terminate(force)
        if self._leaving is not None:
            child, leaving = self._leaving
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await child.terminate(force)
            self._leaving = None
        self._enter(ProcessState.STOPPED)
        self._log.close()

    async def _exits_before_it_is_replaced(self, child: Child) -> bool:
        exit_ = asyncio.create_task(child.wait_exit(), name=f"{self.spec.name} exit")
        asked = asyncio.create_task(self._asked.wait(), name=f"{self.spec.name} replacement")
        try:
            await asyncio.wait((exit_, asked), return_when=asyncio.FIRST_COMPLETED)
            return exit_.done()
        finally:
            for task in (exit_, asked):
                task.cancel()
            await asyncio.gather(exit_, asked, return_exceptions=True)

    async def _carry_out(self, replacement: asyncio.Future[None]) -> None:
        self._asked.clear()
        try:
            await (self._start_successor() if self.spec.starts_first else self._stop_and_start())
        except ChildFailedError as error:
            self._tell(replacement, error)
            if not self.ready:
                await self._restart(str(error), ran_seconds=0.0)
        else:
            self._tell(replacement, None)
        finally:
            self._tell(replacement, ChildFailedError(f"{self.spec.name} was stopped meanwhile"))
            self._replacement = None

    @staticmethod
    def _tell(replacement: asyncio.Future[None], error: ChildFailedError | None) -> None:
        if replacement.done():  # who asked has gone
            return
        if error is None:
            replacement.set_result(None)
        else:
            replacement.set_exception(error)

    async def _start_successor(self) -> None:
        predecessor = self._child
        assert predecessor is not None
        successor = self._launch()
        try:
            ready = await successor.wait_ready()
        except BaseException:
            await successor.kill()
            raise
        if self._leaving is not None:  # of an earlier replacement whose asker did not wait
            await asyncio.shield(self._leaving[1])
        self._child, self._ready = successor, ready
        goodbye = asyncio.create_task(self._say_goodbye(predecessor), name=f"{self.spec.name} predecessor")
        self._leaving = (predecessor, goodbye)
        self._enter(ProcessState.READY)
        self._on_change()

    async def _say_goodbye(self, predecessor: Child) -> None:
        await predecessor.terminate(self._force)
        self._leaving = None
        self._on_change()

    async def _stop_and_start(self) -> None:
        assert self._child is not None
        self._enter(ProcessState.STOPPING)
        await self._child.terminate(self._force)
        await self.start()

    def _launch(self) -> Child:
        try:
            if self.spec.listens_on is not None and self._listener is None:
                self._listener = self.spec.listens_on.listener()
            return Child(self.spec, self._log, self._listener, self._on_leaving)
        except OSError as error:
            raise ChildFailedError(f"{self.spec.name} could not be launched: {error}") from error

    def close_port(self) -> None:
        """The process alone, if it still runs, takes what comes to its socket."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.close()
            self._listener = None

    def _enter(self, state: ProcessState) -> None:
        if state is not self._state:
            self._state = state
            self._on_change()
