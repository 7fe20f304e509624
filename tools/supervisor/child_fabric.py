"""A fabric of its own for a measurement: `kvloom up` as a child process, with its own data directory and free ports."""

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

from kvloom.config import KvloomConfig, dump_config
from tools.failures import CommandError
from tools.supervisor.child import bound_command

_START_TIMEOUT_SECONDS: Final = 300.0
_STOP_TIMEOUT_SECONDS: Final = 60.0


@contextlib.asynccontextmanager
async def child_fabric(config: KvloomConfig, data_dir: Path) -> AsyncIterator[str]:
    """Its URL once it is ready; stopped in the end. `config.model` must be filled in; ports are chosen. It dies with
    this process, however that ends. Raises CommandError when it does not come up."""
    config.edge.port = config.router.port = 0
    config_path = data_dir / "kvloom.json"
    dump_config(config, config_path)
    # -P: a folder called "tools" in the user's working directory must not be taken for ours.
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
    """Takes all that is printed, so that the fabric never waits for its reader."""
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read(), name="kvloom up's errors")
    async for line in process.stdout:
        if line.startswith(b"ready: ") and not ready.done():
            ready.set_result(line.removeprefix(b"ready: ").decode().strip())
    said = (await errors).decode(errors="replace").strip()
    if not ready.done():
        ready.set_exception(CommandError(f"the fabric did not come up: {said or 'it ended without a word'}"))


async def _stop(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
