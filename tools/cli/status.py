"""`kvloom status`: shows the processes of the fabric, their addresses and their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from tools.failures import EXIT_NOT_RUNNING
from tools.options import choose_data_dir, config_option, data_dir_option, load_config_file, option
from tools.supervisor.state import FabricState, RunFolder


@click.command()
@option("--json", "as_json", scope="status", is_flag=True, help="Print one JSON object.")
@data_dir_option
@config_option
def status(as_json: bool, data_dir: Path | None, config_file: Path | None) -> None:
    """Show the fabric that runs with this data directory. The exit status is 0 if one runs, and 3 if none does."""
    folder = RunFolder(choose_data_dir(data_dir, load_config_file(config_file)))
    if not as_json:
        _print_table(folder.require_running())
        return
    state = folder.read_running()
    print(msgspec.json.encode(_as_json(state)).decode())
    if state is None:
        raise SystemExit(EXIT_NOT_RUNNING)


def _as_json(state: FabricState | None) -> dict[str, Any]:
    if state is None:
        return {"phase": "stopped", "http_url": None, "router_address": None, "processes": []}
    return {
        "phase": state.phase,
        "http_url": state.http_url,
        "router_address": state.router_address,
        "model": state.model,
        "supervisor_pid": state.supervisor_pid,
        "processes": state.processes,
    }


def _print_table(state: FabricState) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{state.phase}: {state.http_url} (router {state.router_address}, model {state.model})", markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("name", "role", "pid", "state", "restarts", "address", "metrics"):
        table.add_column(column, no_wrap=True)
    for process in state.processes:
        pid = "-" if process.pid is None else str(process.pid)
        table.add_row(
            process.name,
            process.role,
            pid,
            process.state,
            str(process.restarts),
            process.address,
            process.metrics_address,
        )
    console.print(table)
    for process in state.processes:
        if process.engine:
            console.print(f"{process.name}: {process.engine}", markup=False)
    variants = sorted({process.variant for process in state.processes if process.variant})
    if len(variants) > 1:
        console.print(
            f"warning: shards compute in different ways ({', '.join(variants)}): an answer that fails over from one to "
            "another may continue with other tokens; shard.torch.kernels can hold them to one",
            markup=False,
        )
