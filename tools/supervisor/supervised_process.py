"""Keeps one process of the fabric running: starts it, restarts it with backoff when it dies, replaces it on request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import socket
import time
from collections.abc import Callable
from pathlib import Path

from kvloom.backoff import Backoff
from kvloom_common.process.ready_line import ReadyLine
from tools.supervisor.child import Child, ChildFailedError, ChildSpec
from tools.supervisor.logs.bounded_log import open_log


def restart_backoff() -> Backoff:
    """The delays before one process is restarted. They start again once a run has lasted for 30 seconds."""
    return Backoff(0.2, max_seconds=15.0, stable_seconds=30.0)


class ProcessState(enum.StrEnum):
    """The state of a supervised process."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """It died, and the next start waits for the backoff."""
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The status of one process as shown by `kvloom status`."""

    role: str
    name: str
    pid: int | None
    """None while the process is not running."""
    state: str
    restarts: int = 0
    address: str = ""
    metrics_address: str = ""
    router_address: str = ""
    """The address of the router in this process, if there is one."""
    router_metrics_address: str = ""
    internal_address: str = ""
    """Where that router serves the processes of the fabric."""
    peer_address: str = ""
    """Where the edge in this process serves them."""
    engine: str = ""
    """The engine that computes in it, if it is a shard."""
    variant: str = ""
    shard_role: str = ""
    """The part that it takes in disaggregated prefill, if it is a shard with one."""
    model: str = ""
    """The model that it serves, if it is a shard."""


class SupervisedProcess:
    """Runs one ChildSpec. `on_change` is called after every change of `status`, and `on_event` with a line for
    users."""

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
        self._log = open_log(log_path)
        self._on_change = on_change
        self._on_event = on_event
        self._backoff = backoff or restart_backoff()
        self._child: Child | None = None
        self._state = ProcessState.STOPPED
        self._listener: socket.socket | None = None
        """Passed on to a successor, so that connections in its queue are not lost. Closed when the process dies, so
        that its siblings get new connections."""
        self._leaving: tuple[Child, asyncio.Task[None]] | None = None
        """The predecessor while it finishes its running requests."""
        self._replacement: asyncio.Future[None] | None = None
        """A requested replacement that `keep_running` has not completed."""
        self._replacement_requested = asyncio.Event()
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
            internal_address=self._ready.internal_address,
            peer_address=self._ready.peer_address,
            engine=self._ready.engine,
            variant=self._ready.variant,
            model=self.spec.model,
        )

    @property
    def predecessor(self) -> ProcessStatus | None:
        """The status of the replaced process as long as it still runs."""
        if self._leaving is None or not self._leaving[0].running:
            return None
        return ProcessStatus(self.spec.role, self.spec.name, self._leaving[0].pid, ProcessState.STOPPING.value)

    @property
    def ready(self) -> bool:
        return self._state is ProcessState.READY and self._child is not None and self._child.running

    async def start(self) -> None:
        """Launch the process and wait until it is ready. Raises ChildFailedError; the child may still run (see
        `stop`)."""
        self._enter(ProcessState.STARTING)
        self._child = None
        self._child = self._launch()
        self._on_change()
        self._ready = await self._child.wait_ready()
        self._enter(ProcessState.READY)

    async def keep_running(self) -> None:
        """Restarts the process with backoff whenever it dies, and carries out replacements. Returns when it has ended
        for good, as it had reported."""
        while True:
            child = self._child
            assert child is not None, "keep_running comes after start"
            started = time.monotonic()
            if await self._exits_before_it_is_replaced(child):
                self.close_port()
                reason = await child.exit_report()
                if child.ends_for_good:
                    self._enter(ProcessState.STOPPED)
                    return
                await self._restart(reason, ran_seconds=time.monotonic() - started)
            elif self._replacement is not None:
                await self._carry_out(self._replacement)

    async def replace(self, force: asyncio.Event) -> None:
        """Do a planned restart, carried out by `keep_running`: a successor is ready before this process stops if the
        spec allows it. Returns when the predecessor has exited; `force` kills it at once. Raises ChildFailedError if
        the successor fails to start. Then the old process continues, or is restarted until it works."""
        if not self.ready or self._replacement is not None:
            raise ChildFailedError(f"{self.spec.name} is not running steadily ({self._state.value})")
        await self._request_successor(force)
        if self._leaving is not None:
            await asyncio.shield(self._leaving[1])

    def _request_successor(self, force: asyncio.Event) -> asyncio.Future[None]:
        self._replacement = asyncio.get_running_loop().create_future()
        self._force = force
        self._replacement_requested.set()
        return self._replacement

    def _on_leaving(self, child: Child) -> None:
        """Called when a process is about to accept no more connections. Its socket would then collect them until it
        has exited. If it was not this supervisor that stopped it, its siblings or else a successor must accept them
        from now on."""
        if child is not self._child or not self.ready or self._replacement is not None:
            return
        self._restarts += 1
        self._on_event(f"{self.spec.name} was stopped from outside: a successor replaces it")
        if self.spec.listens_on is not None and self.spec.listens_on.is_served(besides=self._listener):
            self.close_port()
        self._request_successor(asyncio.Event()).add_done_callback(self._on_successor)

    def _on_successor(self, started: asyncio.Future[None]) -> None:
        if started.exception() is None:
            self._report_restart()

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
                # A process that hangs while starting must be killed before the next attempt.
                if self._child is not None:
                    await self._child.kill()
            else:
                self._report_restart()
                return

    def _report_restart(self) -> None:
        self._on_event(f"{self.spec.name} has restarted (pid {self.status.pid})")

    async def stop(self, force: asyncio.Event) -> None:
        """Stop the process (see Child.terminate). `keep_running` must have been cancelled. May be called repeatedly."""
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
        requested = asyncio.create_task(self._replacement_requested.wait(), name=f"{self.spec.name} replacement")
        try:
            await asyncio.wait((exit_, requested), return_when=asyncio.FIRST_COMPLETED)
            return exit_.done()
        finally:
            for task in (exit_, requested):
                task.cancel()
            await asyncio.gather(exit_, requested, return_exceptions=True)

    async def _carry_out(self, replacement: asyncio.Future[None]) -> None:
        self._replacement_requested.clear()
        try:
            await (self._start_successor() if self.spec.starts_first else self._stop_and_start())
        except ChildFailedError as error:
            self._resolve(replacement, error)
            if not self.ready:
                await self._restart(str(error), ran_seconds=0.0)
        else:
            self._resolve(replacement, None)
        finally:
            self._resolve(replacement, ChildFailedError(f"{self.spec.name} was stopped meanwhile"))
            self._replacement = None

    @staticmethod
    def _resolve(replacement: asyncio.Future[None], error: ChildFailedError | None) -> None:
        if replacement.done():  # the caller of `replace` was cancelled
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
        if self._leaving is not None:  # from an earlier replacement whose caller did not wait
            await asyncio.shield(self._leaving[1])
        self._child, self._ready = successor, ready
        termination = asyncio.create_task(
            self._terminate_predecessor(predecessor), name=f"{self.spec.name} predecessor"
        )
        self._leaving = (predecessor, termination)
        self._enter(ProcessState.READY)
        self._on_change()

    async def _terminate_predecessor(self, predecessor: Child) -> None:
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
        """Close this side of the listener. Only the process itself, if it still runs, accepts its connections."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.close()
            self._listener = None

    def _enter(self, state: ProcessState) -> None:
        if state is not self._state:
            self._state = state
            self._on_change()
