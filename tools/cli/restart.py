"""`kvloom restart`: successors for the processes of a running fabric, one after another, without losing a request."""

from __future__ import annotations

from pathlib import Path

import click

from tools.options import choose_data_dir, config_option, data_dir_option, load_config_file, option
from tools.supervisor.control import ask_restart
from tools.supervisor.restart_plan import plan_restart
from tools.supervisor.state import RunFolder


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@option("--rolling", scope="restart", is_flag=True, help="All processes, except an embedded Redis.")
@data_dir_option
@config_option
def restart(names: tuple[str, ...], rolling: bool, data_dir: Path | None, config_file: Path | None) -> None:
    """Restart processes of a running fabric, one after another.

    NAME is a process (edge-0, router, shard-1, safety) or all of a role (shard). Each one finishes what it runs; edges
    and routers have a successor before they stop taking work. Redis is restarted when it is named.
    """
    if not names and not rolling:
        raise click.UsageError("name processes, or give --rolling for all")
    if names and rolling:
        raise click.UsageError("--rolling restarts all processes: name none")
    folder = RunFolder(choose_data_dir(data_dir, load_config_file(config_file)))
    state = folder.require_running()
    plan_restart(state.processes, names)  # a wrong name fails here, whatever the fabric is doing
    ask_restart(folder.run_dir, names, lambda text: click.echo(f"  {text}"))
    click.echo("restarted")
