"""`kvloom models compare`: whether a candidate finds the answers of a model as likely as the model does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import click
import psutil

from kvloom.client.client import Client
from tools.cli.router_client import RouterFlags, client_options
from tools.models.comparison import Comparison, ComparisonPlan, compare, fetched_model, lines, report
from tools.options import choose_data_dir, option
from tools.supervisor.child_fabric import child_fabric
from tools.supervisor.state import RunFolder

EXIT_WORSE = 5


@click.command("compare")
@click.argument("model")
@click.argument("candidate")
@option(
    "--requests", scope="models", type=click.IntRange(10, 200), default=60, show_default=True, help="Prompts to ask."
)
@option(
    "--max-tokens",
    scope="models",
    type=click.IntRange(1, 4096),
    default=64,
    show_default=True,
    help="The longest answer, in tokens.",
)
@option(
    "--temperature",
    scope="models",
    type=click.FloatRange(0, 2),
    default=1.0,
    show_default=True,
    help="The answers' temperature.",
)
@option(
    "--threshold",
    scope="models",
    type=click.FloatRange(0),
    default=0.05,
    show_default=True,
    help="The likelihood gap, in nats per token, above which the candidate is worse.",
)
@option(
    "--concurrency",
    scope="models",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    help="Requests at a time.",
)
@option("--json", "as_json", scope="models", is_flag=True, help="Print one JSON object.")
@client_options
def compare_models(
    model: str,
    candidate: str,
    requests: int,
    max_tokens: int,
    temperature: float,
    threshold: float,
    concurrency: int,
    as_json: bool,
    reach: RouterFlags,
) -> None:
    """Have MODEL answer prompts, and CANDIDATE say how likely it finds the answers.

    Both must be served by the fabric of the data directory. If none runs there, one is started for the measurement,
    with the --config file. Exits with 5 if the candidate is worse than the threshold allows.
    """
    if model == candidate:
        raise click.UsageError("MODEL and CANDIDATE must be two different models")
    plan = ComparisonPlan(model, candidate, requests, max_tokens, temperature, concurrency, threshold)

    def tell(text: str) -> None:
        click.echo(f"  {text}", err=True)

    async def measure() -> Comparison:
        async with _fabric(reach) as folder:
            where = None if folder is None else folder.data_dir
            routers = dataclasses.replace(reach, data_dir=where, config_file=None).routers()
            address, open_channel = routers.any_address, routers.open_channel
            async with Client(address, open_channel=open_channel) as client:
                return await compare(
                    client,
                    plan,
                    lambda name: fetched_model(client, open_channel, address, name),
                    lambda name: None if folder is None else _cpu_seconds(folder, name),
                    tell,
                )

    found = asyncio.run(measure())
    click.echo(json.dumps(report(found)) if as_json else "\n".join(lines(found)))
    if found.verdict == "worse":
        raise click.exceptions.Exit(EXIT_WORSE)


@contextlib.asynccontextmanager
async def _fabric(reach: RouterFlags) -> AsyncIterator[RunFolder | None]:
    """The fabric that runs, or one that is started for the measurement; None: one somewhere else."""
    if reach.router_address is not None:
        yield None
        return
    config = reach.load_config()
    running = RunFolder(choose_data_dir(reach.data_dir, config))
    if reach.config_file is None or running.read_running() is not None:
        running.require_running()
        yield running
        return
    with tempfile.TemporaryDirectory(prefix="kvloom-compare-") as folder:
        async with child_fabric(config, Path(folder)):
            yield RunFolder(Path(folder))


def _cpu_seconds(folder: RunFolder, model: str) -> float | None:
    """Returns the CPU seconds of the model's shards on this machine; None if there are none, or another process is in
    their place."""
    state = folder.read_running()
    pids = [] if state is None else [p.pid for p in state.processes if p.role == "shard" and p.model == model and p.pid]
    try:
        times = [psutil.Process(pid).cpu_times() for pid in pids]
    except psutil.NoSuchProcess:
        return None
    return sum(time.user + time.system for time in times) if times else None
