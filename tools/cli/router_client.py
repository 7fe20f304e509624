"""Finds the address of the router for commands, and the model that it serves."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import click
import grpc.aio

from kvloom.client.client import Client
from kvloom.client.credentials import TlsOptions, channel_opener
from kvloom.transport.channel_options import CHANNEL_OPTIONS, OpenChannel
from tools.fabric_trust import trust_of_running
from tools.failures import CommandError
from tools.fleet.members import Fleet
from tools.options import F, choose_data_dir, load_config_file, option
from tools.supervisor.readiness import reachable_address
from tools.supervisor.state import RunFolder


@dataclasses.dataclass(frozen=True)
class Routers:
    """The routers that a command asks."""

    any_address: str
    """Where any of them may answer."""
    own_addresses: list[str]
    """One of each router; empty if they are not known."""
    open_channel: OpenChannel


def client_options(function: F) -> F:
    """The flags with which a command reaches a router like any client."""
    for add_option in (
        option(
            "--tls-ca",
            type=click.Path(path_type=Path, dir_okay=False, exists=True),
            help="Use TLS with --router-address, and trust the authorities in this file.",
        ),
        option("--tls", is_flag=True, help="Use TLS with --router-address, and trust the system's authorities."),
        option("--api-key", help="The API key to send to --router-address. Prefer the variable to the flag."),
        option(
            "--router-address",
            metavar="HOST:PORT",
            help="The address of the router.  [default: that of the fabric in the data directory]",
        ),
    ):
        function = add_option(function)
    return function


def choose_routers(
    flag: str | None,
    data_dir: Path | None,
    config_file: Path | None,
    *,
    api_key: str | None = None,
    tls: bool = False,
    tls_ca: Path | None = None,
) -> Routers:
    """Returns the flag's router, which sees a client; or those of the fabric in the data directory, which see an
    operator. Raises CommandError if no fabric runs there."""
    if flag is not None:
        with_tls = TlsOptions(tls_ca) if tls or tls_ca is not None else None
        return Routers(flag, [], channel_opener(api_key or "", with_tls))
    folder = RunFolder(choose_data_dir(data_dir, load_config_file(config_file)))
    state, trust = folder.require_running(), trust_of_running(folder)
    own = [process.internal_address or process.router_address for process in state.processes if process.router_address]

    def open_channel(address: str) -> grpc.aio.Channel:
        return trust.open_channel(address, "router", options=CHANNEL_OPTIONS)

    own = list(map(reachable_address, own))
    if not own and not state.router_address:
        # Another machine of the fleet has the routers.
        own = sorted(asyncio.run(Fleet.open(data_dir, config_file).records()).routers)
        if not own:
            raise CommandError("no router of the fleet is registered")
    return Routers(own[0] if own else state.router_address, own, open_channel)


async def first_model(client: Client) -> str:
    """The first one that generates, beside encoders. Raises CommandError if no model is served, and KvloomError if the
    router does not answer."""
    models = await client.list_models()
    if not models:
        raise CommandError("no model is served now")
    return next((model.name for model in models if "generate" in model.capabilities), models[0].name)
