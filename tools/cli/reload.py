"""`kvloom reload`: applies a changed configuration file to a running fabric."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from tools.cli.running import running_folder
from tools.options import config_option, data_dir_option, option
from tools.supervisor.service.client import local_supervisor


@click.command()
@option(
    "--restart",
    scope="reload",
    is_flag=True,
    help="Also restart the processes that read a changed key, one after another.",
)
@option("--dry-run", scope="reload", is_flag=True, help="Only say what would change, and what would apply it.")
@data_dir_option
@config_option
def reload(restart: bool, dry_run: bool, data_dir: Path | None, config_file: Path | None) -> None:
    """Apply the changed configuration file of the fabric on this machine.

    The file is the one that `kvloom up` was started with, or FILE, from now on. Flags of `kvloom up` still override it.
    For each key that has changed, a line says that it was applied, or what applies it. A faulty file changes nothing.
    """
    folder = running_folder(data_dir, config_file)
    path = config_file and config_file.expanduser().absolute()

    async def ask() -> None:
        async with local_supervisor(folder.run_dir) as supervisor:
            await supervisor.reload(path, restart, lambda text: click.echo(f"  {text}"), dry_run=dry_run)

    asyncio.run(ask())
    click.echo("nothing was changed" if dry_run else "reloaded")
