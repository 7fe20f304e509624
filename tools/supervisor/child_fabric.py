"""Runs `kvloom up` as a child process for a measurement, with a data directory of its own and free ports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from kvloom_common.config import KvloomConfig, dump_config
from tools.failures import CommandError
from tools.supervisor.child import bound_command

_START_TIMEOUT_SECONDS: Final = 300.0
_STOP_TIMEOUT_SECONDS: Final = 60.0


@contextlib.asynccontextmanager
async def child_fabric(config: KvloomConfig, data_dir: Path) -> AsyncIterator[str]:
    """Yields the URL when the fabric is ready, and stops the fabric at the end. `config` must name the model; the ports
    are chosen here. The fabric dies with this process. Raises CommandError if it does not start."""
    config.edge.port = config.router.port = 0
    config_path = data_dir / "kvloom.json"
    dump_config(config, config_path)
    # -P: a folder called "tools" in the working directory must not be imported instead of ours.
    up = (
        sys.executable,
        "-P",
        "-m",
        "tools.cli.commands",
        "up",
        "--config",
        str(config_path),
        "--data-dir",
        str(data_dir),
    )
    settings = {name: value for name, value in os.environ.items() if not name.startswith("KVLOOM_")}
    process = await asyncio.create_subprocess_exec(
        *bound_command(up), stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=PIPE, env=settings, process_group=0
    )
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(_read(process, ready), name="kvloom up")
    try:
        async with asyncio.timeout(_START_TIMEOUT_SECONDS):
            url = await ready
        yield url
    except TimeoutError as error:
        if ready.done():
            raise
        raise CommandError(f"the fabric was not ready within {_START_TIMEOUT_SECONDS:g} s") from error
    finally:
        await _stop(process)
        await reading


async def _read(process: Process, ready: asyncio.Future[str]) -> None:
    """Read all output, so that the fabric never blocks on a full pipe."""
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read(), name="kvloom up's errors")
    async for line in process.stdout:
        if line.startswith(b"ready: ") and not ready.done():
            ready.set_result(line.removeprefix(b"ready: ").decode().strip())
    output = (await errors).decode(errors="replace").strip()
    if not ready.done():
        ready.set_exception(CommandError(f"the fabric did not come up: {output or 'it exited without output'}"))


async def _stop(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
