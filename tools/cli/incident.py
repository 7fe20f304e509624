"""`kvloom incident`: what a router was given and what it decided, as one file that repeats it elsewhere."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import click

from kvloom_common.private_file import write_private_file
from router.incidents.bundle import read_runs
from router.incidents.recorded_core import FOLDER
from tools.failures import CommandError
from tools.options import FabricFlags, fabric_options, option


@click.group()
def incident() -> None:
    """Keep what happened in a router, to repeat it elsewhere (`router.records_incidents`)."""


@incident.command("capture")
@click.argument("bundle", type=click.Path(path_type=Path, dir_okay=False))
@option("--router", scope="incident", default="router", show_default=True, help="The name of the router.")
@option(
    "--run",
    scope="incident",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="The run of the log, counted from the end: a router that starts again begins one, and so does a gap.",
)
@fabric_options
def capture(bundle: Path, router: str, run: int, fabric: FabricFlags) -> None:
    """Write the last events of a router of this machine to the file BUNDLE. The router runs on.

    It has no prompts and no answers, but block hashes and the names of sessions. `kvloom-lab dst --replay BUNDLE`
    decides all of it again.
    """
    folder = fabric.home() / FOLDER
    paths = [folder / f"{router}.jsonl.1", folder / f"{router}.jsonl"]
    contents = [path.read_bytes().splitlines() for path in paths if path.is_file()]
    try:
        runs = read_runs(itertools.chain.from_iterable(contents))
    except ValueError as error:
        raise CommandError(f"{folder}: {error}") from error
    if len(runs) < run:
        raise CommandError(f"{folder}: {len(runs)} runs of {router} are there (router.records_incidents is off?)")
    chosen = runs[-run]
    packed = gzip.compress(b"\n".join([chosen.header, *chosen.lines]) + b"\n")
    try:
        write_private_file(bundle, packed)
    except OSError as error:
        raise CommandError(f"{bundle}: {error.strerror or error}") from error
    click.echo(f"{bundle}: {len(chosen.lines):,} events in {chosen.num_seconds:,.1f} s, {len(packed):,} bytes")
