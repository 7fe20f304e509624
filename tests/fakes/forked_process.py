"""Services' processes without their start: a process that has imported their modules forks them.

Most of a second goes to the start of Python and to imports whenever a test starts a service. What runs here is the same
`main()` in a process of its own, with its own arguments, signals, output and exit status.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

SERVICES = ("control", "router", "safety_svc", "shard_server")
"""Their modules are imported before the fork."""

_context: ForkServerContext | None = None


class ForkedProcess:
    """What tests use of `asyncio.subprocess.Process`."""

    def __init__(self, process: BaseProcess, stdout: asyncio.StreamReader, stderr: asyncio.StreamReader) -> None:
        self.stdout = stdout
        self._stderr = stderr
        self._process = process

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, signum: signal.Signals) -> None:
        if self._process.pid is not None and self._process.exitcode is None:
            os.kill(self._process.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def communicate(self) -> tuple[bytes, bytes]:
        """Returns what is left of stdout and stderr once the process has ended."""
        outputs = await asyncio.gather(self.stdout.read(), self._stderr.read())
        await self.wait()
        return outputs[0], outputs[1]

    async def wait(self) -> int:
        """Returns the exit status."""
        if self._process.exitcode is not None:
            return self._process.exitcode
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


async def fork_service(name: str, args: Sequence[str]) -> ForkedProcess:
    """Starts `python -m NAME ARGS`."""
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(2)]
    writers = [writer for _, writer in pipes]
    process = _forking().Process(target=_run, args=(name, tuple(args), dict(os.environ), *writers), daemon=True)
    process.start()
    for writer in writers:
        writer.close()
    return ForkedProcess(process, await _reader(pipes[0][0]), await _reader(pipes[1][0]))


async def _reader(pipe: Any) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    file = os.fdopen(os.dup(pipe.fileno()), "rb", 0)
    pipe.close()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return reader


def _forking() -> ForkServerContext:
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload([__name__, *(f"{name}.__main__" for name in SERVICES)])
    return _context


def _run(name: str, args: Sequence[str], env: dict[str, str], stdout: Connection, stderr: Connection) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [name, *args]
    for number, pipe in ((1, stdout), (2, stderr)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    try:
        importlib.import_module(f"{name}.__main__").main()
    finally:
        atexit._run_exitfuncs()  # which a process of multiprocessing leaves out
