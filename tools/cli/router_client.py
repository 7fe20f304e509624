"""Finds the address of the router for commands, and the model that it serves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc.aio

from kvloom.client.client import Client
from kvloom.transport.channel_options import CHANNEL_OPTIONS, OpenChannel, open_plain_channel
from tools.fabric_trust import trust_of_running
from tools.failures import CommandError
from tools.options import choose_data_dir, load_config_file
from tools.supervisor.readiness import reachable_address
from tools.supervisor.state import RunFolder


def choose_router_address(flag: str | None, data_dir: Path | None, config_file: Path | None) -> str:
    """Returns the flag, or the address of the fabric in the data directory. Raises CommandError if none runs there."""
    if flag is not None:
        return flag
    return RunFolder(choose_data_dir(data_dir, load_config_file(config_file))).require_running().router_address


@dataclasses.dataclass(frozen=True)
class Routers:
    """The routers that a command asks."""

    any_address: str
    """Where any of them may answer."""
    own_addresses: list[str]
    """One of each router; empty if they are not known."""
    open_channel: OpenChannel


def choose_routers(flag: str | None, data_dir: Path | None, config_file: Path | None) -> Routers:
    """Returns the flag's router, which sees a client; or those of the fabric in the data directory, which see an
    operator. Raises CommandError if no fabric runs there."""
    if flag is not None:
        return Routers(flag, [], open_plain_channel)
    folder = RunFolder(choose_data_dir(data_dir, load_config_file(config_file)))
    state, trust = folder.require_running(), trust_of_running(folder)
    own = [process.internal_address or process.router_address for process in state.processes if process.router_address]

    def open_channel(address: str) -> grpc.aio.Channel:
        return trust.open_channel(address, "router", options=CHANNEL_OPTIONS)

    own = list(map(reachable_address, own))
    return Routers(own[0] if own else state.router_address, own, open_channel)


async def first_model(client: Client) -> str:
    """Raises CommandError if no model is served, and KvloomError if the router does not answer."""
    models = await client.list_models()
    if not models:
        raise CommandError("no model is served now")
    return models[0].name
