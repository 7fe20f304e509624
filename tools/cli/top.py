"""`kvloom top`: the fleet and its requests in a terminal, renewed until Ctrl-C, from what the admin page shows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

import click
import grpc.aio
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvloom.v1.overview_pb2 import FleetSample, GetOverviewRequest, GetOverviewResponse, RequestOverview, ShardOverview
from kvloom.v1.overview_pb2_grpc import OverviewServiceStub
from kvloom_common.overview.merge import FleetOverview, merged
from kvloom_common.transport.plain_messages import as_plain
from tools.cli.router_client import RouterFlags, Routers
from tools.failures import CommandError
from tools.options import FabricFlags, Seconds, fabric_options, option

CALL_SECONDS: Final = 5.0
MAX_INTERVAL_SECONDS: Final = 3600.0
NUM_REQUESTS: Final = 20
_BARS: Final = "▁▂▃▄▅▆▇█"
_NUM_BARS: Final = 60
_MAX_ID_CHARS: Final = 18
"""Numbers are whole in a narrow terminal, and ids are not."""


@click.command()
@option(
    "--interval",
    scope="top",
    type=Seconds(MAX_INTERVAL_SECONDS),
    default="2s",
    show_default=True,
    metavar="TIME",
    help="How often it is renewed.",
)
@option("--once", scope="top", is_flag=True, help="Print it once, and end.")
@option("--json", "as_json", scope="top", is_flag=True, help="Print one JSON object, and end.")
@fabric_options
def top(interval: float, once: bool, as_json: bool, fabric: FabricFlags) -> None:
    """Show shards with their load, the last hour as small charts, and the requests that have run longest."""
    routers = RouterFlags(fabric.data_dir, fabric.config_file).routers()
    if as_json:
        fleet = asyncio.run(_ask(routers))
        print(msgspec.json.encode({name: list(map(as_plain, getattr(fleet, name))) for name in _LISTS}).decode())
    elif once:
        Console(highlight=False).print(shown(asyncio.run(_ask(routers))))
    else:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_follow(routers, interval))


_LISTS: Final = ("routers", "shards", "running", "ended", "samples")


async def _follow(routers: Routers, interval: float) -> None:
    with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            try:
                live.update(shown(await _ask(routers)), refresh=True)
            except CommandError as error:  # a router that restarts
                live.update(Text(error.message, style="red"), refresh=True)
            await asyncio.sleep(interval)


async def _ask(routers: Routers) -> FleetOverview:
    """Raises CommandError if no router answers."""
    addresses = routers.own_addresses or [routers.any_address]
    answers = await asyncio.gather(*(_ask_one(routers, address) for address in addresses))
    found = [answer for answer in answers if answer is not None]
    if not found:
        raise CommandError(f"no router answers at {', '.join(addresses)}")
    return merged(found)


async def _ask_one(routers: Routers, address: str) -> GetOverviewResponse | None:
    async with routers.open_channel(address) as channel:
        with contextlib.suppress(grpc.aio.AioRpcError):
            request = GetOverviewRequest(max_requests=NUM_REQUESTS)
            return await OverviewServiceStub(channel).GetOverview(request, timeout=CALL_SECONDS)
    return None


def shown(fleet: FleetOverview) -> Group:
    """The whole screen."""
    num_live = sum(one.num_live_requests for one in fleet.routers)
    num_queued = sum(one.num_queued_requests for one in fleet.routers)
    samples = fleet.samples
    last = samples[-1] if samples else FleetSample()
    return Group(
        Text(f"{len(fleet.shards)} shards, {len(fleet.routers)} routers, {num_live} requests, {num_queued} queued"),
        _line("output tokens/s", last.output_tokens_per_second, [one.output_tokens_per_second for one in samples]),
        _line("running", last.num_running, [one.num_running for one in samples]),
        _line("KV in use %", 100 * last.kv_usage, [100 * one.kv_usage for one in samples]),
        Text(),
        _shards(fleet.shards),
        Text(),
        _requests(fleet.running),
    )


def sparkline(values: Sequence[float], width: int = _NUM_BARS) -> str:
    """The last values as bars, of which the tallest is the largest value."""
    latest = values[-width:]
    highest = max(latest, default=0.0)
    if highest <= 0:
        return _BARS[0] * len(latest)
    return "".join(_BARS[min(int(len(_BARS) * value / highest), len(_BARS) - 1)] for value in latest)


def _line(name: str, now: float, values: Sequence[float]) -> Text:
    return Text.assemble(f"{name:<16}{now:>9,.0f}  ", (sparkline(values), "green"))


def _shards(shards: Sequence[ShardOverview]) -> Table:
    table = _table("shard", "state", "model", right=("KV %", "running", "waiting", "tokens/s", "cached %", "step ms"))
    for one in shards:
        state, usage = state_of(one), 1 - one.num_available_blocks / one.num_blocks if one.num_blocks else 0.0
        table.add_row(
            one.shard_id,
            Text(state, style="" if state == "ready" else "yellow"),
            one.model,
            f"{100 * usage:.0f}",
            f"{one.num_running}/{one.max_batch}",
            str(one.num_waiting),
            f"{one.output_tokens_per_second:,.0f}",
            f"{100 * one.num_cached_tokens / one.num_prompt_tokens:.0f}" if one.num_prompt_tokens else "–",
            f"{1000 * one.decode_step_seconds:.1f}",
        )
    return table


def state_of(shard: ShardOverview) -> str:
    """One word for people."""
    if shard.asleep:
        return "asleep"
    if shard.withdrawn:
        return "withdrawn"
    if shard.draining:
        return "draining" if shard.num_running or shard.num_waiting else "drained"
    return "ready" if shard.health == "healthy" else shard.health


def _requests(running: Sequence[RequestOverview]) -> Table:
    table = _table("request", "state", "tenant", "shard", right=("seconds", "TTFT ms", "prompt", "output"))
    for one in running[:NUM_REQUESTS]:
        outcome = one.outcome
        table.add_row(
            Text(_shorter(one.request_id)),
            one.state,
            Text(_shorter(one.tenant)),
            outcome.shard_id,
            f"{outcome.e2e_latency_seconds:.1f}",
            f"{1000 * outcome.ttft_seconds:.0f}" if outcome.HasField("ttft_seconds") else "–",
            str(outcome.num_prompt_tokens),
            str(outcome.num_output_tokens),
        )
    return table


def _shorter(name: str) -> str:
    return name if len(name) <= _MAX_ID_CHARS else f"{name[: _MAX_ID_CHARS - 7]}…{name[-6:]}"


def _table(*names: str, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, no_wrap=True, justify="right")
    return table
