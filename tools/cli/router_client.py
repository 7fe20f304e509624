"""Finds the address of the router for commands, and the model that it serves."""

from __future__ import annotations

from pathlib import Path

from kvloom.client.client import Client
from tools.failures import CommandError
from tools.options import choose_data_dir, load_config_file
from tools.supervisor.readiness import reachable_address
from tools.supervisor.state import RunFolder


def choose_router_address(flag: str | None, data_dir: Path | None, config_file: Path | None) -> str:
    """Returns the flag, or the address of the fabric in the data directory. Raises CommandError if none runs there."""
    return choose_router_addresses(flag, data_dir, config_file)[0]


def choose_router_addresses(flag: str | None, data_dir: Path | None, config_file: Path | None) -> list[str]:
    """Returns the flag, or the address that the routers of the fabric in the data directory share, followed by the own
    address of each router if there are several. Raises CommandError if no fabric runs there."""
    if flag is not None:
        return [flag]
    state = RunFolder(choose_data_dir(data_dir, load_config_file(config_file))).require_running()
    own = [process.router_address for process in state.processes if process.router_address]
    return [state.router_address, *map(reachable_address, own if len(own) > 1 else [])]


async def first_model(client: Client) -> str:
    """Raises CommandError if no model is served, and KvloomError if the router does not answer."""
    models = await client.list_models()
    if not models:
        raise CommandError("no model is served now")
    return models[0].name
