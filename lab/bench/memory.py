"""`kvloom-lab bench memory`: the memory of a fabric's processes before, during and after bursts, and how long its event
loop is held up meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from kvloom_common.config import KvloomConfig, ModelConfig
from lab.bench.memory_bursts import BURSTS
from shard_server.engines.torch_engine.checkpoint.converted_model import BUILTIN_MODEL_NAME
from tools.failures import CommandError
from tools.models.resolve import model_cache_dir, resolve_model
from tools.options import data_dir_option, option
from tools.process_counters import rss_bytes
from tools.supervisor.child_fabric import child_fabric
from tools.supervisor.state import RunFolder

_SAMPLE_SECONDS: Final = 0.02
_ROLES: Final = ("edge", "router")
_STEP_MS: Final = 2.0
_BOUNDS_MS: Final = (5, 10, 20, 50, 100)


@click.command()
@option(
    "--settle-seconds",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    scope="bench-memory",
    help="From the end of a burst until the memory is read again.",
)
@option(
    "--rounds",
    "num_rounds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    scope="bench-memory",
    help="How often each burst is sent.",
)
@data_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
def bench_memory(settle_seconds: float, num_rounds: int, data_dir: Path | None, as_json: bool) -> None:
    """Send a fabric with the sim engine bursts of large requests and answers. Shows the resident memory of edge and
    router before, at the peak and after, and how long GET /live takes meanwhile."""
    cache_dir = model_cache_dir(data_dir)
    found = resolve_model(BUILTIN_MODEL_NAME, cache_dir, lambda message: click.echo(message, err=True))
    config = KvloomConfig(model=ModelConfig(name=found.name, path=str(found.path)))
    config.shard.engine, config.shard.num_shards, config.shard.sim.step_ms = "sim", 1, _STEP_MS
    config.safety.answer_mode = "off"
    rows = asyncio.run(_run(config, settle_seconds, num_rounds))
    if as_json:
        click.echo(json.dumps(rows))
    else:
        _show(rows)


async def _run(config: KvloomConfig, settle_seconds: float, num_rounds: int) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="kvloom-bench-"))
    try:
        async with child_fabric(config, folder) as url:
            state = RunFolder(folder).read_running()
            if state is None:
                raise CommandError("the fabric has ended")
            pids = {role: [p.pid for p in state.processes if p.role == role and p.pid] for role in _ROLES}
            rows: list[dict[str, Any]] = []
            for _ in range(num_rounds):
                for name, burst in BURSTS.items():
                    click.echo(f"sending {name}", err=True)
                    row: dict[str, Any] = {"burst": name, "before": _resident(pids)}
                    async with _peaks(pids, row), _live_times(url, row):
                        await burst(url, state.router_address, config.model.name)
                    await asyncio.sleep(settle_seconds)
                    rows.append(row | {"after": _resident(pids)})
            return rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _resident(pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """In MB, by role."""
    return {role: round(rss_bytes(own) / 1e6, 1) for role, own in pids.items()}


@contextlib.asynccontextmanager
async def _peaks(pids: Mapping[str, Sequence[int]], row: dict[str, Any]) -> AsyncIterator[None]:
    row["peak"] = peak = _resident(pids)

    async def sample() -> None:
        while True:
            for role, resident in _resident(pids).items():
                peak[role] = max(peak[role], resident)
            await asyncio.sleep(_SAMPLE_SECONDS)

    sampling = asyncio.create_task(sample(), name="samples of memory")
    try:
        yield
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)


@contextlib.asynccontextmanager
async def _live_times(url: str, row: dict[str, Any]) -> AsyncIterator[None]:
    host, port = url.removeprefix("http://").split(":")
    command = (sys.executable, "-P", "-m", "lab.bench.live_probe", host, port)
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        yield
    finally:
        output, _ = await process.communicate(b"")  # which closes its input
    took_ms: list[float] = json.loads(output)
    row["live_max_ms"] = max(took_ms, default=0.0)
    row["live_histogram"] = histogram(took_ms)


def histogram(took_ms: Sequence[float]) -> dict[str, int]:
    """How many answers took up to so many milliseconds."""
    counts = {f"<={bound} ms": sum(low < took <= bound for took in took_ms) for low, bound in _intervals()}
    return counts | {f">{_BOUNDS_MS[-1]} ms": sum(took > _BOUNDS_MS[-1] for took in took_ms)}


def _intervals() -> list[tuple[int, int]]:
    return list(zip((-1, *_BOUNDS_MS[:-1]), _BOUNDS_MS, strict=True))


def _show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("burst", "edge, MB", "router, MB", "/live, slowest", "/live, answers by time")
    shown: Callable[[dict[str, Any], str], str] = lambda row, role: " → ".join(  # noqa: E731
        f"{row[when][role]:.0f}" for when in ("before", "peak", "after")
    )
    for row in rows:
        times = ", ".join(f"{count} {bound}" for bound, count in row["live_histogram"].items() if count)
        table.add_row(row["burst"], shown(row, "edge"), shown(row, "router"), f"{row['live_max_ms']:.1f} ms", times)
    Console().print("Resident memory before → at the peak → after", table)
