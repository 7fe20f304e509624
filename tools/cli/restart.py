"""`kvloom restart`: replaces the processes of a running fabric one after another without losing a request."""

from __future__ import annotations

from pathlib import Path

import click

from tools.options import choose_data_dir, config_option, data_dir_option, load_config_file, option
from tools.supervisor.control import request_restart
from tools.supervisor.process_specs import plan_restart
from tools.supervisor.state import RunFolder


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@option("--rolling", scope="restart", is_flag=True, help="Restart all processes except an embedded Redis.")
@data_dir_option
@config_option
def restart(names: tuple[str, ...], rolling: bool, data_dir: Path | None, config_file: Path | None) -> None:
    """Restart processes of a running fabric, one after another.

    NAME is a process (edge-0, router, shard-1, safety) or a role (shard). Each process finishes its requests, and the
    successor of an edge or a router is ready before it stops accepting work. Redis is restarted only if it is named.
    """
    if not names and not rolling:
        raise click.UsageError("give names of processes, or --rolling for all")
    if names and rolling:
        raise click.UsageError("--rolling restarts all processes and takes no names")
    folder = RunFolder(choose_data_dir(data_dir, load_config_file(config_file)))
    state = folder.require_running()
    plan_restart(state.processes, names)  # a wrong name fails here, in any state of the fabric
    request_restart(folder.run_dir, names, lambda text: click.echo(f"  {text}"))
    click.echo("restarted")
