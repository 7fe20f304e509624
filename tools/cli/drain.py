"""`kvloom drain`, `kvloom undrain` and `kvloom scale-in`: take a shard out of service without losing its requests, put
it back, or end it for good."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Final

import click
import grpc

from kvloom.v1 import shard_service_pb2, shard_service_pb2_grpc
from kvloom.v1.shard_service_pb2 import DrainRequest
from tools.failures import CommandError
from tools.fleet.members import FleetAccess
from tools.fleet.view import REGISTERED
from tools.options import FabricFlags, Seconds, fabric_options, option
from tools.supervisor.readiness import reachable_address
from tools.supervisor.supervised_process import ProcessState

POLL_SECONDS: Final = 0.1
CALL_TIMEOUT_SECONDS: Final = 5.0
MAX_WITHIN_SECONDS: Final = 7 * 24 * 3600.0
EXIT_SECONDS: Final = 15.0
"""How long a process may take to end after its time, before that is an error."""
_LOST: Final = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}


@click.command()
@click.argument("shard")
@option(
    "--deadline-seconds",
    scope="drain",
    type=click.FloatRange(min=0),
    metavar="S",
    help="The time after which running requests are moved to other shards.  [default: wait until they end]",
)
@option(
    "--within",
    scope="drain",
    type=Seconds(MAX_WITHIN_SECONDS),
    metavar="TIME",
    help="SHARD has to be empty by then, as in 5s: what will not end in time moves before, one request after another.",
)
@fabric_options
def drain(
    shard: str,
    deadline_seconds: float | None,
    within: float | None,
    fabric: FabricFlags,
) -> None:
    """Send no new requests to SHARD (a name in `kvloom status`), and return when it has no requests left.

    SHARD may be on any machine of the fleet. Requests for which no other shard has room stay on SHARD. It drains until
    `kvloom undrain` or a restart of its process, even if this command is interrupted.
    """
    if deadline_seconds is not None and within is not None:
        raise click.UsageError("give --deadline-seconds or --within")
    request = DrainRequest(draining=True, deadline_seconds=deadline_seconds, empty_within_seconds=within)
    fleet = FleetAccess.open(fabric)
    asyncio.run(_warn_of_last(shard, fleet))
    asyncio.run(_drain(shard, fleet, request))
    print(f"{shard} is drained")


@click.command("scale-in")
@click.argument("shard")
@option(
    "--within",
    scope="scale_in",
    type=Seconds(MAX_WITHIN_SECONDS),
    default="30s",
    show_default=True,
    metavar="TIME",
    help="SHARD ends by then at the latest, as in 5s.",
)
@fabric_options
def scale_in(shard: str, within: float, fabric: FabricFlags) -> None:
    """End SHARD (a name in `kvloom status`, on any machine of the fleet) for good, without ending a stream.

    What will not end in time moves to other shards, one request after another. Without another shard, running requests
    are held until one comes. Returns when the process has ended; it is not restarted. It cannot be taken back.
    """
    asyncio.run(_scale_in(shard, FleetAccess.open(fabric), within))
    print(f"{shard} has ended")


@click.command()
@click.argument("shard")
@fabric_options
def undrain(shard: str, fabric: FabricFlags) -> None:
    """Send requests to SHARD (a name in `kvloom status`) again."""
    asyncio.run(_undrain(shard, FleetAccess.open(fabric)))
    print(f"{shard} takes requests again")


async def find_shard(fleet: FleetAccess, name: str) -> str:
    """Returns the address of a shard. Raises CommandError, which names the existing shards, if there is none."""
    local, _ = await fleet.local_state()
    shards = {p.name: p for p in local.processes if p.role == "shard"} if local is not None else {}
    if name in shards:
        if not shards[name].address:
            raise CommandError(f"{name} does not serve now ({shards[name].state})")
        return reachable_address(shards[name].address)
    if local is None and not fleet.config.redis.url:
        fleet.folder.require_running()
    records = (await fleet.records()).shards
    if name not in records:
        raise CommandError(f"there is no shard {name!r}; there are: {', '.join(sorted({*shards, *records}))}")
    return records[name].address


async def _warn_of_last(shard: str, fleet: FleetAccess) -> None:
    """On stderr. Raises CommandError if there is no such shard."""
    await find_shard(fleet, shard)
    shards = [process for process in (await fleet.view(with_shards=True)).processes if process.role == "shard"]
    model = next((process.model for process in shards if process.name == shard), "")
    ready = (ProcessState.READY, REGISTERED)
    if not any(one.name != shard and one.model == model and one.state in ready for one in shards):
        print(
            f"warning: {shard} is the only shard of {model or 'its model'} that takes requests: they are refused until "
            "`kvloom undrain`",
            file=sys.stderr,
        )


async def _drain(shard: str, fleet: FleetAccess, request: DrainRequest) -> None:
    """Prints the counts to stderr whenever they change."""
    address = await find_shard(fleet, shard)
    try:
        async with fleet.trust.open_channel(address, "shard", shard) as channel:
            stub = shard_service_pb2_grpc.ShardServiceStub(channel)
            answer = await stub.Drain(request, timeout=CALL_TIMEOUT_SECONDS)
            if answer.HasField("error"):
                raise CommandError(answer.error.message)
            printed = None
            counts = (answer.num_running, answer.num_waiting)
            while any(counts):
                if counts != printed:
                    print(f"{shard}: {counts[0]} running, {counts[1]} waiting", file=sys.stderr)
                    printed = counts
                await asyncio.sleep(POLL_SECONDS)
                info = await stub.GetInfo(shard_service_pb2.GetInfoRequest(), timeout=CALL_TIMEOUT_SECONDS)
                if not info.load.draining:
                    raise CommandError(f"{shard} takes requests again: it was undrained or restarted")
                counts = (info.load.num_running, info.load.num_waiting)
    except grpc.aio.AioRpcError as error:
        raise _unreachable(shard, address, error) from error


async def _scale_in(shard: str, fleet: FleetAccess, within_seconds: float) -> None:
    """Returns when the shard does not answer any more, and is not in the state of this machine."""
    address = await find_shard(fleet, shard)
    request = DrainRequest(draining=True, empty_within_seconds=within_seconds, exit=True)
    give_up_at = time.monotonic() + within_seconds + EXIT_SECONDS
    is_asked = False
    try:
        async with fleet.trust.open_channel(address, "shard", shard) as channel:
            stub = shard_service_pb2_grpc.ShardServiceStub(channel)
            answer = await stub.Drain(request, timeout=CALL_TIMEOUT_SECONDS)
            if answer.HasField("error"):
                raise CommandError(answer.error.message)
            is_asked = True
            print(f"{shard}: {answer.num_running} running, {answer.num_waiting} waiting", file=sys.stderr)
            while time.monotonic() < give_up_at:
                await asyncio.sleep(POLL_SECONDS)
                await stub.GetInfo(shard_service_pb2.GetInfoRequest(), timeout=CALL_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        if not is_asked or error.code() not in _LOST:
            raise _unreachable(shard, address, error) from error
    while await _is_in_state(shard, fleet):
        if time.monotonic() >= give_up_at:
            raise CommandError(f"{shard} was told to end, and has not ended {EXIT_SECONDS:g} s after its time")
        await asyncio.sleep(POLL_SECONDS)


async def _is_in_state(shard: str, fleet: FleetAccess) -> bool:
    local, _ = await fleet.local_state()
    return local is not None and any(process.name == shard for process in local.processes)


async def _undrain(shard: str, fleet: FleetAccess) -> None:
    address = await find_shard(fleet, shard)
    try:
        async with fleet.trust.open_channel(address, "shard", shard) as channel:
            stub = shard_service_pb2_grpc.ShardServiceStub(channel)
            request = DrainRequest(draining=False)
            answer = await stub.Drain(request, timeout=CALL_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise _unreachable(shard, address, error) from error
    if answer.HasField("error"):
        raise CommandError(answer.error.message)


def _unreachable(shard: str, address: str, error: grpc.aio.AioRpcError) -> CommandError:
    if error.code() in _LOST:
        return CommandError(f"{shard} does not answer at {address}")
    return CommandError(f"{shard}: {error.details()}")
