"""A shard whose event loop TensorRT-LLM blocks: only another process can see what becomes of it."""

from __future__ import annotations

import asyncio
import sys

from tests.conftest import REPOSITORY

TIMEOUT_SECONDS = 60.0
SCRIPT = """
import asyncio, sys
from shard_server.engines.tensorrt_llm import engine
from shard_server.engines.tensorrt_llm.health import WatchSettings
from tests.conformance.engine_driver import prompt_of, request_of
from tests.fakes.tensorrt_llm_engine import running_tensorrt_llm

async def main(where):
    engine.SHUTDOWN_SECONDS = 0.2
    config = WatchSettings(loop_timeout_seconds=1.0)
    async with running_tensorrt_llm(config=config) as (driver, fake):
        await driver.run(request_of("a", prompt_of(1, 10), 5))
        fake.llm.hangs_in = where
        if where == "shutdown":
            fake.llms.clear()  # its own end would stop the executor, too
        print("works", flush=True)
        if where != "shutdown":
            await driver.run(request_of("b", prompt_of(1, 10), 5))

asyncio.run(main(sys.argv[1]))
"""


async def run_until_it_hangs(where: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SCRIPT,
        where,
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, stdout.decode(), stderr.decode()


async def test_a_process_whose_loop_hangs_in_the_library_ends_with_a_status_and_says_where():
    """It could neither answer nor exit: routers would wait for it, and no supervisor would restart it. In the
    shutdown it is another thread that hangs, and the process would only not end."""
    places = {"submit": "in generate_async", "response": "in __anext__", "shutdown": "in shutdown"}
    ends = await asyncio.gather(*(run_until_it_hangs(where) for where in places))
    for frame, (status, stdout, stderr) in zip(places.values(), ends, strict=True):
        assert "works" in stdout, stderr
        assert status == 1, stderr
        assert "Timeout (0:00:01)!" in stderr
        assert frame in stderr
