"""Finds the control service of a fleet, for commands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

import grpc.aio

from kvloom.transport.channel_options import CHANNEL_OPTIONS
from kvloom_common.addresses import join_address
from tools.failures import CommandError
from tools.fleet.members import FleetAccess
from tools.supervisor.readiness import reachable_address

PATIENCE_SECONDS: Final = 10.0
"""How long a command waits for a control service that is being restarted."""
_RETRY_SECONDS: Final = 0.25
_CONNECT_SECONDS: Final = 2.0


@contextlib.asynccontextmanager
async def control_channel(fleet: FleetAccess) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that is connected. Raises CommandError."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while True:
        addresses = await _addresses(fleet)
        for address in addresses:
            async with fleet.trust.open_channel(address, "control", options=CHANNEL_OPTIONS) as channel:
                if await _is_ready(channel):
                    yield channel
                    return
        if asyncio.get_running_loop().time() >= deadline:
            problem = f"{', '.join(addresses)} does not answer" if addresses else "it is not running"
            raise CommandError(f"no control service can be reached: {problem} (kvloom status; kvloom logs control)")
        await asyncio.sleep(_RETRY_SECONDS)


async def _is_ready(channel: grpc.aio.Channel) -> bool:
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            await channel.channel_ready()
    except TimeoutError:
        return False
    return True


async def _addresses(fleet: FleetAccess) -> list[str]:
    """Where a control service may be: on this machine, elsewhere in the fleet, or where the configuration says."""
    state = fleet.folder.read_running()
    found = [] if state is None else [process.address for process in state.processes if process.role == "control"]
    if fleet.config.control.port:
        found.append(join_address(fleet.config.control.host, fleet.config.control.port))
    if not any(found) and fleet.config.redis.url:
        found = [record.address for record in (await fleet.records()).control.values()]
    return [reachable_address(address) for address in dict.fromkeys(filter(None, found))]
