"""`kvloom restart`: replaces the processes of a running fabric one after another without losing a request."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from tools.failures import EXIT_INCOMPLETE
from tools.fleet.members import FleetAccess
from tools.fleet.view import plan_fleet_restart, skipped_by_restart
from tools.options import config_option, data_dir_option, local_option, option


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@option("--rolling", scope="restart", is_flag=True, help="Restart all processes except an embedded Redis.")
@local_option
@data_dir_option
@config_option
def restart(
    names: tuple[str, ...], rolling: bool, local: bool, data_dir: Path | None, config_file: Path | None
) -> None:
    """Restart processes of a running fabric, one after another, in a fleet machine by machine.

    NAME is a process (edge-0, router, shard-1, safety) or a role (shard). Each process finishes its requests, and the
    successor of an edge or a router is ready before it stops accepting work. Redis is restarted only if it is named.
    """
    if not names and not rolling:
        raise click.UsageError("give names of processes, or --rolling for all")
    if names and rolling:
        raise click.UsageError("--rolling restarts all processes and takes no names")
    is_complete = asyncio.run(_restart(FleetAccess.open(data_dir, config_file, local_only=local), names))
    click.echo("restarted")
    if not is_complete:
        raise SystemExit(EXIT_INCOMPLETE)


async def _restart(fleet: FleetAccess, names: Sequence[str]) -> bool:
    """Returns whether every machine could be asked. Raises CommandError at the first process that cannot be
    restarted."""
    view = await fleet.view()
    # A wrong name fails here, before anything is restarted.
    plan = plan_fleet_restart(view, names)
    problems = [*view.problems, *(f"{machine.problem}: it is left alone" for machine in view.unreachable)]
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    for process in skipped_by_restart(view, names):
        print(f"warning: {process.name} was not started by `kvloom up`, and is left alone", file=sys.stderr)
    for machine, processes in plan:
        async with fleet.supervisor_of(machine) as supervisor:
            await supervisor.restart(processes, lambda text: click.echo(f"  {text}"))
    return not problems
