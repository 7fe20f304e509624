"""One operating-system process started by `kvloom up`: launch, output, readiness, exit, termination."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvloom_common.process.ready_line import END_LINE, LEAVING_LINE, ReadyLine
from tools.supervisor.logs.bounded_log import BoundedLog
from tools.supervisor.shared_port import SharedPort

_EXEC_BOUND: Final = Path(__file__).with_name("die_with_parent.py")
_CHUNK_BYTES: Final = 64 * 2**10
_MAX_TAIL_BYTES: Final = 16 * 2**10
_MAX_READY_LINE_BYTES: Final = 64 * 2**10
_LAST_OUTPUT_TIMEOUT_SECONDS: Final = 2.0


class ChildFailedError(Exception):
    """A process failed to start or exited. The message has the reason and its last lines of output."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChildSpec:
    """Says what to run, and how to find out that it is ready."""

    role: str
    """"edge", "router", "shard", "safety", "control", "orchestrator" or "redis"."""
    name: str
    argv: tuple[str, ...]
    """The command line. argv[0] is a path or a name in PATH."""
    probe: Callable[[], Awaitable[ReadyLine | None]] | None = None
    """Called repeatedly until it returns a ReadyLine. None means that the process prints one itself."""
    start_timeout_seconds: float = 300.0
    stop_timeout_seconds: float = 35.0
    """The time between SIGTERM and SIGKILL."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Variables in addition to the environment of this process."""
    listens_on: SharedPort | None = None
    """The process gets a socket that is bound to this port, with `--listen-fd`."""
    has_launcher: bool = False
    """True when `argv` runs the process by another one. SIGTERM then goes to the whole group, because not every
    launcher passes it on: a shell waits for its command first."""
    model: str = ""
    """The model that it serves, if it is a shard."""
    starts_first: bool = False
    """True when a successor may start while its predecessor still runs. Otherwise it would find its address in use."""


def bound_command(argv: Sequence[str]) -> list[str]:
    """The command for `argv` as a process that dies with this one, however this one dies (see die_with_parent.py)."""
    return [sys.executable, "-I", "-S", str(_EXEC_BOUND), str(os.getpid()), *argv]


def launched_command(launcher: Sequence[str], argv: Sequence[str]) -> tuple[str, ...]:
    """The command by which `launcher` runs `argv`, as a process that dies with the launcher."""
    if not launcher:
        return tuple(argv)
    return (*launcher, sys.executable, "-I", "-S", str(_EXEC_BOUND), "0", *argv)


class Child:
    """A launched process. It leads a process group of its own, so that a Ctrl-C in the terminal does not reach it and
    its own children can be killed with it. The kernel kills it if this process dies."""

    def __init__(
        self,
        spec: ChildSpec,
        log: BoundedLog,
        listener: socket.socket | None = None,
        on_leaving: Callable[[Child], None] | None = None,
    ) -> None:
        """The process inherits `listener`, which the caller still owns. `on_leaving` is called when the process reports
        that it is about to accept no more connections from it. Raises OSError if the process cannot be launched."""
        self.spec = spec
        self.ends_for_good = False
        """True when the process has reported that no other one is to take its place."""
        self._on_leaving = on_leaving
        self._log = log
        self._tail: collections.deque[bytes] = collections.deque()
        self._num_tail_bytes = 0
        self._exited = asyncio.Event()
        self._ready_line: asyncio.Future[ReadyLine] = asyncio.get_running_loop().create_future()
        inherited = () if listener is None else (listener.fileno(),)
        flags = () if listener is None else ("--listen-fd", str(listener.fileno()))
        self._popen = subprocess.Popen(
            bound_command((*spec.argv, *flags)),
            pass_fds=inherited,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.env},
        )
        try:
            self._pidfd = os.pidfd_open(self._popen.pid)
        except OSError:  # short of descriptors: without one its exit would go unnoticed
            self._abandon()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)
        self._pumps = [
            asyncio.create_task(self._pump(self._popen.stdout, is_stdout=True), name=f"{spec.name} stdout"),
            asyncio.create_task(self._pump(self._popen.stderr, is_stdout=False), name=f"{spec.name} stderr"),
        ]

    def _abandon(self) -> None:
        """Undo the launch."""
        self._signal_group(signal.SIGKILL)
        self._popen.wait()
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return not self._exited.is_set()

    async def wait_ready(self) -> ReadyLine:
        """Raises ChildFailedError if the process exits first or exceeds its start timeout."""
        announced = asyncio.create_task(self._announcement(), name=f"{self.spec.name} readiness")
        exited = asyncio.create_task(self._exited.wait(), name=f"{self.spec.name} exit")
        try:
            await asyncio.wait(
                (announced, exited),
                timeout=self.spec.start_timeout_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if announced.done():
                return announced.result()
            if not exited.done():
                limit = self.spec.start_timeout_seconds
                raise ChildFailedError(f"{self.spec.name} was not ready after {limit:g} s{self._last_lines()}")
        finally:
            for task in (announced, exited):
                task.cancel()
            await asyncio.gather(announced, exited, return_exceptions=True)
        raise ChildFailedError(await self.exit_report())

    async def wait_exit(self) -> None:
        await self._exited.wait()

    async def exit_report(self) -> str:
        """Wait for the process to exit. Returns how it did, with its last lines. Kills the rest of its process
        group."""
        await self._exited.wait()
        self._signal_group(signal.SIGKILL)
        await self._finish_output()
        code = self._popen.returncode
        how = f"ended with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return f"{self.spec.name} {how}{self._last_lines()}"

    async def terminate(self, force: asyncio.Event) -> None:
        """Send SIGTERM, and SIGKILL to the whole group after the stop timeout of the spec or as soon as `force` is set.
        Returns when the process has exited. May be called repeatedly."""
        if self.running and self.spec.has_launcher:
            self._signal_group(signal.SIGTERM)
        elif self.running:
            self._popen.terminate()
        forced = asyncio.create_task(force.wait(), name=f"{self.spec.name} force")
        exited = asyncio.create_task(self._exited.wait(), name=f"{self.spec.name} exit")
        try:
            await asyncio.wait(
                (forced, exited), timeout=self.spec.stop_timeout_seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in (forced, exited):
                task.cancel()
            await asyncio.gather(forced, exited, return_exceptions=True)
        await self.kill()

    async def kill(self) -> None:
        """Send SIGKILL to the whole group. Returns when the process has exited. May be called repeatedly."""
        self._signal_group(signal.SIGKILL)
        await self._exited.wait()
        await self._finish_output()

    async def _announcement(self) -> ReadyLine:
        if self.spec.probe is None:
            # Shielded, because the future outlives this wait.
            return await asyncio.shield(self._ready_line)
        while True:
            ready = await self.spec.probe()
            if ready is not None:
                return ready
            await asyncio.sleep(0.02)

    def _on_exit(self) -> None:
        self._popen.poll()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exited.set()

    def _signal_group(self, signum: int) -> None:
        """Signal the group, which exists as long as any process in it, even if its leader has exited."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signum)

    async def _pump(self, pipe: object, *, is_stdout: bool) -> None:
        reader = asyncio.StreamReader(limit=_CHUNK_BYTES)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        head = b""
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                self._log.write(chunk)
                self._remember(chunk)
                if is_stdout:
                    head = self._parse_stdout(head + chunk)
        finally:
            transport.close()

    def _parse_stdout(self, text: bytes) -> bytes:
        """Look for the lines that report readiness, leaving and the end. Returns the incomplete last line."""
        *lines, rest = text.split(b"\n")
        for line in lines:
            if not self._ready_line.done():
                self._parse_ready_line(line)
            elif line == END_LINE:
                self.ends_for_good = True
            elif line == LEAVING_LINE and self._on_leaving is not None:
                self._on_leaving(self)
        return rest[-_MAX_READY_LINE_BYTES:]

    def _parse_ready_line(self, line: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            ready = msgspec.json.decode(line, type=ReadyLine)
            if ready.event == "ready":
                self._ready_line.set_result(ready)

    def _remember(self, chunk: bytes) -> None:
        self._tail.append(chunk[-_MAX_TAIL_BYTES:])
        self._num_tail_bytes += len(self._tail[-1])
        while self._num_tail_bytes - len(self._tail[0]) >= _MAX_TAIL_BYTES:
            self._num_tail_bytes -= len(self._tail.popleft())

    def _last_lines(self, max_lines: int = 12) -> str:
        """The error that the process printed last, as services do, or otherwise the end of its output, indented."""
        lines = [line for line in b"".join(self._tail).decode(errors="replace").splitlines() if line.strip()]
        if lines and lines[-1].startswith("error: "):
            return f": {lines[-1].removeprefix('error: ')}"
        return "".join(f"\n  {line}" for line in lines[-max_lines:])

    async def _finish_output(self) -> None:
        """Read the rest of the pipes. The time is limited, because a process that left the group may hold them open."""
        done, pending = await asyncio.wait(self._pumps, timeout=_LAST_OUTPUT_TIMEOUT_SECONDS)
        for pump in pending:
            pump.cancel()
        await asyncio.gather(*done, *pending, return_exceptions=True)
