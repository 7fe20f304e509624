"""Runs a data-plane workload once, with load clients in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from kvloom_common.config import ModelConfig
from lab.bench.data_plane.load import BEGUN, Order
from lab.bench.data_plane.workloads import Workload
from tools.failures import CommandError
from tools.supervisor.child import bound_command

_MARGIN_SECONDS: Final = 60.0
_BEGIN_TIMEOUT_SECONDS: Final = 120.0
_OTHERS_SEED: Final = 1000
"""Added to a run's seed for the other clients, so that their prompts differ from the measured ones."""


async def drive(
    model: ModelConfig, workload: Workload, url: str, pids: dict[str, list[int]], seed: int, api_key: str = ""
) -> dict[str, Any]:
    """Return what the client has measured, including the CPU time and memory of the given processes by role. `api_key`:
    where callers need one. Raises CommandError."""
    address = urlsplit(url)
    order = Order(
        host=address.hostname or "127.0.0.1",
        port=address.port or 80,
        model=model.name,
        model_path=model.path,
        workload=workload,
        seed=seed,
        pids=pids,
        api_key=api_key,
    )
    if workload.beside is None:
        return await _measure(order)
    others = msgspec.structs.replace(order, workload=workload.beside, seed=_OTHERS_SEED + seed, pids={})
    async with _sending(others):
        return await _measure(order)


async def _measure(order: Order) -> dict[str, Any]:
    name = order.workload.name
    async with _client(order) as process:
        try:
            async with asyncio.timeout(order.workload.timeout_seconds + _MARGIN_SECONDS):
                said, errors = await process.communicate()
        except TimeoutError as error:
            raise CommandError(f"{name}: the load client did not end") from error
    if process.returncode:
        raise CommandError(f"{name}: the load client failed: {errors.decode(errors='replace')[-2000:]}")
    return msgspec.json.decode(said.removeprefix(BEGUN))


@contextlib.asynccontextmanager
async def _sending(order: Order) -> AsyncIterator[None]:
    """Send the order's requests from the first answer on, until the end of the block."""
    name = order.workload.name
    async with _client(order) as process:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_BEGIN_TIMEOUT_SECONDS):
                if await process.stdout.readline() != BEGUN:
                    raise CommandError(f"{name}: none was answered")
        except TimeoutError as error:
            raise CommandError(f"{name}: none was answered in {_BEGIN_TIMEOUT_SECONDS:g} seconds") from error
        more = asyncio.create_task(process.stdout.read(), name=name)
        try:
            yield
            if more.done():
                raise CommandError(f"{name}: they were over (or failed) before what was to be measured beside them")
        finally:
            more.cancel()
            await asyncio.gather(more, return_exceptions=True)


@contextlib.asynccontextmanager
async def _client(order: Order) -> AsyncIterator[Process]:
    """Start a load client with the order. It is ended at the end of the block at the latest."""
    command = bound_command((sys.executable, "-P", "-m", "lab.bench.data_plane.load"))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(order))
        process.stdin.write_eof()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
