"""`kvloom reload` applies a changed configuration file to a running fabric, and `kvloom restart` replaces its processes
one after another without losing a request."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import click

from tools.cli.running import running_folder
from tools.failures import EXIT_INCOMPLETE
from tools.fleet.members import FleetAccess
from tools.fleet.view import plan_fleet_restart, skipped_by_restart
from tools.options import FabricFlags, fabric_options, local_option, option
from tools.supervisor.service.client import local_supervisor


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@option("--rolling", scope="restart", is_flag=True, help="Restart all processes except an embedded Redis.")
@local_option
@fabric_options
def restart(names: tuple[str, ...], rolling: bool, local: bool, fabric: FabricFlags) -> None:
    """Restart processes of a running fabric, one after another, in a fleet machine by machine.

    NAME is a process (edge-0, router, shard-1, safety) or a role (shard). Each process finishes its requests, and the
    successor of an edge or a router is ready before it stops accepting work. Redis is restarted only if it is named.
    """
    if not names and not rolling:
        raise click.UsageError("give names of processes, or --rolling for all")
    if names and rolling:
        raise click.UsageError("--rolling restarts all processes and takes no names")
    is_complete = asyncio.run(_restart(FleetAccess.open(fabric, local_only=local), names))
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


@click.command()
@option(
    "--restart",
    scope="reload",
    is_flag=True,
    help="Also restart the processes that read a changed key, one after another.",
)
@option("--dry-run", scope="reload", is_flag=True, help="Only say what would change, and what would apply it.")
@fabric_options
def reload(restart: bool, dry_run: bool, fabric: FabricFlags) -> None:
    """Apply the changed configuration file of the fabric on this machine.

    The file is the one that `kvloom up` was started with, or FILE, from now on. Flags of `kvloom up` still override it.
    For each key that has changed, a line says that it was applied, or what applies it. A faulty file changes nothing.
    """
    folder = running_folder(fabric)
    path = fabric.config_file and fabric.config_file.expanduser().absolute()

    async def ask() -> None:
        async with local_supervisor(folder.run_dir) as supervisor:
            await supervisor.reload(path, restart, lambda text: click.echo(f"  {text}"), dry_run=dry_run)

    asyncio.run(ask())
    click.echo("nothing was changed" if dry_run else "reloaded")
