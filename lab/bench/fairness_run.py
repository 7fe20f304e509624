"""Measures what a tenant that floods a real fabric costs another one: the same experiment as `fairness_model.py`.

The calm tenant sends the same requests in every run: alone, beside a tenant that sends many times as many, and beside
the same flood under its own API key, so that the router takes both for one tenant.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvloom_common.config import KvloomConfig
from lab.bench.arrivals import Requests, arrival_times, measure_capacity, play_arrivals
from lab.bench.bench_fabric import BenchFabric, bench_fabric
from lab.bench.fairness_model import CALM, FLOOD, rise
from tools.bench.streams import MeasuredStream
from tools.simulate.runs import Curves
from tools.simulate.statistics import quantile

_CAPACITY_SECONDS: Final = 15.0
_MAX_WARM_UP_SECONDS: Final = 5.0
_MAX_WAIT_SECONDS: Final = 120.0
"""For the calm tenant's last answers."""


class FabricFairnessPlan(msgspec.Struct, frozen=True, kw_only=True):
    requests: Requests
    calm_load: float
    """The calm tenant asks for this share of what the fabric can serve."""
    flood_factor: float
    seconds: float
    """While requests are sent, in each run."""

    @property
    def warm_up_seconds(self) -> float:
        """Requests of the first seconds are not counted, because the flood begins in an empty fabric."""
        return min(_MAX_WARM_UP_SECONDS, self.seconds / 4)

    @property
    def capacity_seconds(self) -> float:
        return min(_CAPACITY_SECONDS, self.seconds)


class Run(msgspec.Struct, frozen=True):
    """The requests of one run, each with when it was sent, in seconds from the beginning."""

    calm: Sequence[tuple[float, MeasuredStream]]
    flood: Sequence[tuple[float, MeasuredStream]]
    began_at: float
    """In seconds since the epoch."""


async def run(
    config: KvloomConfig, plan: FabricFairnessPlan, curves: dict[str, Curves], on_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Start a fabric and measure all runs on it. `curves` gets the calm tenant's TTFTs. Raises CommandError."""
    on_progress("starting a fabric")
    async with bench_fabric(config, (CALM, FLOOD)) as fabric:
        on_progress(f"what the fabric can serve, {plan.capacity_seconds:g} s")
        num_places = config.shard.num_started * config.shard.max_batch
        capacity = await measure_capacity(fabric, plan.requests, num_places, plan.capacity_seconds, fabric.keys[CALM])
        on_progress(f"{capacity:.2f} requests/s; the calm tenant alone, {plan.seconds:g} s")
        alone = await _play(fabric, plan, "alone", capacity, flood_as=None)
        # Before the run with two tenants, because shards that tenants compete for are shared differently for a while.
        on_progress("beside the flood, as one tenant")
        as_one = await _play(fabric, plan, "as-one", capacity, flood_as=CALM)
        on_progress("beside the flood")
        fair = await _play(fabric, plan, "beside", capacity, flood_as=FLOOD)
    rows = [
        {"run": "alone", **row_of(alone.calm, alone.began_at, plan)},
        {"run": "beside the flood", **row_of(fair.calm, fair.began_at, plan)},
        {"run": "the flood itself", **row_of(fair.flood, fair.began_at, plan)},
        {"run": "beside the flood, as one tenant", **row_of(as_one.calm, as_one.began_at, plan)},
    ]
    for row, one in zip((rows[0], rows[1], rows[3]), (alone, fair, as_one), strict=True):
        curves[row["run"]] = Curves(_ttfts(_counted(one.calm, plan)), [])
    return {
        "engine": config.shard.engine,
        "device": config.shard.torch.device,
        "num_shards": config.shard.num_started,
        "max_batch": config.shard.max_batch,
        "policy": config.router.placement.policy,
        "capacity_per_second": round(capacity, 2),
        "calm_load": plan.calm_load,
        "flood_factor": plan.flood_factor,
        "seconds": plan.seconds,
        "warm_up_seconds": plan.warm_up_seconds,
        "requests": msgspec.to_builtins(plan.requests),
        "rows": rows,
        "served_tokens_per_second": served_per_second((*fair.calm, *fair.flood), fair.began_at, plan),
        "served_as_one_tokens_per_second": served_per_second((*as_one.calm, *as_one.flood), as_one.began_at, plan),
        "ttft_p99_rise": rise(rows[0], rows[1]),
    }


async def _play(
    fabric: BenchFabric, plan: FabricFairnessPlan, name: str, capacity: float, *, flood_as: str | None
) -> Run:
    rate = plan.calm_load * capacity
    calm = _arrivals(plan, CALM, rate, name, fabric.keys[CALM])
    flood = [] if flood_as is None else _arrivals(plan, FLOOD, rate * plan.flood_factor, name, fabric.keys[flood_as])
    awaited = {stream.name for _, stream in calm}
    began_at = await play_arrivals(
        fabric, [*calm, *flood], lambda stream: stream.name in awaited, max_wait_seconds=_MAX_WAIT_SECONDS
    )
    return Run(calm, flood, began_at)


def _arrivals(
    plan: FabricFairnessPlan, group: str, rate: float, run_name: str, api_key: str
) -> list[tuple[float, MeasuredStream]]:
    times = arrival_times(rate, 0.0, plan.seconds, random.Random(f"{plan.requests.seed} {group} arrivals"))
    return [
        (at, plan.requests.stream(number, group, run_name=run_name, api_key=api_key)) for number, at in enumerate(times)
    ]


def row_of(sent: Sequence[tuple[float, MeasuredStream]], began_at: float, plan: FabricFairnessPlan) -> dict[str, Any]:
    """Requests whose client left before their answer had ended are neither answered nor errors."""
    counted = _counted(sent, plan)
    ttfts = _ttfts(counted)
    return {
        "requests": len(counted),
        "answered": sum(stream.has_finished for stream in counted),
        "errors": sum(bool(stream.error) for stream in counted),
        "error_codes": sorted({stream.error_code for stream in counted if stream.error_code}),
        "tokens_per_second": _per_second(sent, began_at, plan, lambda stream: stream.num_output_tokens),
        "ttft_p50": _rounded(quantile(ttfts, 0.5)),
        "ttft_p99": _rounded(quantile(ttfts, 0.99)),
    }


def served_per_second(sent: Sequence[tuple[float, MeasuredStream]], began_at: float, plan: FabricFairnessPlan) -> float:
    """Prompt and output tokens."""
    return _per_second(sent, began_at, plan, lambda stream: stream.num_prompt_tokens + stream.num_output_tokens)


def _per_second(
    sent: Sequence[tuple[float, MeasuredStream]],
    began_at: float,
    plan: FabricFairnessPlan,
    tokens_of: Callable[[MeasuredStream], int],
) -> float:
    """Returns a figure per second of the answers that ended after the warm-up and while requests were sent."""
    begin, end = began_at + plan.warm_up_seconds, began_at + plan.seconds
    ended = [stream for _, stream in sent if stream.has_finished and begin <= stream.pieces_at[-1] <= end]
    return round(sum(map(tokens_of, ended)) / (plan.seconds - plan.warm_up_seconds), 1)


def _counted(sent: Sequence[tuple[float, MeasuredStream]], plan: FabricFairnessPlan) -> list[MeasuredStream]:
    return [stream for at, stream in sent if at >= plan.warm_up_seconds]


def _ttfts(streams: Sequence[MeasuredStream]) -> list[float]:
    return sorted(ttft for stream in streams if (ttft := stream.ttft_seconds) is not None)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
