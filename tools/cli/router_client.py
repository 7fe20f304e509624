"""Finds the address of the router for commands, and the model that it serves."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import grpc.aio

from kvloom.client.client import Client
from kvloom.client.credentials import TlsOptions, channel_opener
from kvloom.transport.channel_options import CHANNEL_OPTIONS, OpenChannel
from kvloom.v1.router_service_pb2 import ModelInfo
from tools.fabric_trust import trust_of_running
from tools.failures import CommandError
from tools.fleet.members import FleetAccess
from tools.options import FabricFlags, config_option, data_dir_option, given_as, option
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


@dataclasses.dataclass(frozen=True)
class RouterFlags(FabricFlags):
    """The flags by which a command reaches a router: like any client, or as an operator of the fabric."""

    router_address: str | None = None
    api_key: str | None = None
    tls: bool = False
    tls_ca: Path | None = None

    def routers(self) -> Routers:
        """Returns the router of --router-address, which sees a client; or those of the fabric in the data directory,
        which see an operator. Raises CommandError if no fabric runs there."""
        if self.router_address is not None:
            with_tls = TlsOptions(self.tls_ca) if self.tls or self.tls_ca is not None else None
            return Routers(self.router_address, [], channel_opener(self.api_key or "", with_tls))
        folder = RunFolder(self.home())
        state, trust = folder.require_running(), trust_of_running(folder)
        processes = [process for process in state.processes if process.router_address]
        own = [reachable_address(process.internal_address or process.router_address) for process in processes]

        def open_channel(address: str) -> grpc.aio.Channel:
            return trust.open_channel(address, "router", options=CHANNEL_OPTIONS)

        if not own and not state.router_address:
            # Another machine of the fleet has the routers.
            own = sorted(asyncio.run(FleetAccess.open(self).records()).routers)
            if not own:
                raise CommandError("no router of the fleet is registered")
        return Routers(own[0] if own else state.router_address, own, open_channel)


client_options: Final = given_as(
    "reach",
    RouterFlags,
    config_option,
    data_dir_option,
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
)


async def first_model(client: Client) -> str:
    """The first one that can chat now. Raises CommandError if none can, and KvloomError if the router does not
    answer."""
    return first_that_generates(await client.list_models())


def first_that_generates(models: Sequence[ModelInfo]) -> str:
    """One that takes requests now, if there is one, or otherwise one that sleeps or has no shard. Raises CommandError
    if none generates, as where only encoders are served."""
    if not models:
        raise CommandError("no model is served now")
    # Shards that do nothing else need not say that they generate.
    able = [one for one in models if "generate" in one.capabilities or "embed" not in one.capabilities]
    if not able:
        names = ", ".join(model.name for model in models)
        raise CommandError(f"no served model generates text: there are {names} (choose with --model)")
    return next((model for model in able if model.num_ready_shards and not model.withdrawn), able[0]).name
