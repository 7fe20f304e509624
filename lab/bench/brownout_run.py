"""A time of overload on a real fabric with the brownout ladder and without: the same experiment as `brownout_model.py`.

An interactive request is good when its first token comes within the objective. All times of the ladder are as much
shorter than the defaults as the overload is shorter than the four minutes of the modelled experiment, and its caps fit
the lengths of the answers.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvloom_common.config import BrownoutConfig, BrownoutStepConfig, KvloomConfig
from lab.bench.arrivals import Requests, arrival_times, measure_capacity, play_arrivals
from lab.bench.bench_fabric import BenchFabric, bench_fabric
from lab.bench.brownout_model import phases_of
from lab.bench.modelled import share_of
from lab.bench.plots import RunTimeline
from tools.bench.streams import MeasuredStream
from tools.simulate.statistics import quantile

LADDER: Final = "ladder"
WITHOUT: Final = "without"
_MODELLED_OVERLOAD_SECONDS: Final = 240.0
_CAPACITY_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.25
_REFUSED: Final = (429, 408)
"""Statuses of requests that were refused at once, and of those that waited for as long as they may."""


class FabricBrownoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    requests: Requests
    load: float
    """During the overload, as a multiple of what the fabric can serve."""
    batch_share: float
    ttft_slo_seconds: float
    overload_seconds: float

    @property
    def phases(self) -> Sequence[tuple[str, float, float, float]]:
        return phases_of(self.overload_seconds, self.load)

    @property
    def capacity_seconds(self) -> float:
        return min(_CAPACITY_SECONDS, self.overload_seconds)

    def ladder(self) -> BrownoutConfig:
        """Shorter answers by two steps, and then no batch requests and a short queue."""
        default = BrownoutConfig()
        pace = self.overload_seconds / _MODELLED_OVERLOAD_SECONDS
        return BrownoutConfig(
            enabled=True,
            ttft_slo_seconds=self.ttft_slo_seconds,
            min_step_seconds=default.min_step_seconds * pace,
            hold_seconds=default.hold_seconds * pace,
            steps=[
                BrownoutStepConfig(max_tokens=max(1, self.requests.max_tokens // 2)),
                BrownoutStepConfig(max_tokens=max(1, self.requests.max_tokens // 4)),
                BrownoutStepConfig(shed=["batch"], max_queue_seconds=self.ttft_slo_seconds / 2),
            ],
        )


class BrownoutRun(msgspec.Struct, frozen=True):
    arrivals: Sequence[tuple[float, MeasuredStream]]
    steps: Sequence[tuple[float, int]]
    """(seconds from the beginning, step) of each change."""


async def run(
    config: KvloomConfig,
    plan: FabricBrownoutPlan,
    timelines: dict[str, RunTimeline],
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Start two fabrics, one after the other. `timelines` gets each run. Raises CommandError."""
    total = plan.phases[-1][2]
    on_progress("starting a fabric without a ladder")
    async with bench_fabric(config) as fabric:
        on_progress(f"what the fabric can serve, {plan.capacity_seconds:g} s")
        num_places = config.shard.num_started * config.shard.max_batch
        capacity = await measure_capacity(fabric, plan.requests, num_places, plan.capacity_seconds)
        on_progress(f"{capacity:.2f} requests/s; without the ladder, {total:g} s")
        without = await _play(fabric, plan, WITHOUT, capacity)
    on_progress("starting a fabric with the ladder")
    config.router.brownout = plan.ladder()
    async with bench_fabric(config) as fabric:
        # As the other one it has been busy before, so that its router knows how fast the shards are.
        await measure_capacity(fabric, plan.requests, num_places, plan.capacity_seconds)
        await _until_whole(fabric, plan)
        on_progress(f"with the ladder, {total:g} s")
        ladder = await _play(fabric, plan, LADDER, capacity)
    for name, one in ((LADDER, ladder), (WITHOUT, without)):
        timelines[name] = RunTimeline([(at, is_good(s, plan)) for at, s in one.arrivals if not s.is_batch], one.steps)
    return {
        "engine": config.shard.engine,
        "device": config.shard.torch.device,
        "num_shards": config.shard.num_started,
        "max_batch": config.shard.max_batch,
        "capacity_per_second": round(capacity, 2),
        "load": plan.load,
        "batch_share": plan.batch_share,
        "ttft_slo_seconds": plan.ttft_slo_seconds,
        "overload_seconds": plan.overload_seconds,
        "requests": msgspec.to_builtins(plan.requests),
        LADDER: report_of(ladder, plan),
        WITHOUT: report_of(without, plan),
    }


async def _until_whole(fabric: BenchFabric, plan: FabricBrownoutPlan) -> None:
    """Until the router has taken back the steps of the time in which requests never ran out. Raises TimeoutError."""
    async with asyncio.timeout(60.0 + 16 * plan.ladder().hold_seconds):
        while await fabric.brownout_step():  # noqa: ASYNC110  (only the router's metrics say so)
            await asyncio.sleep(_POLL_SECONDS)


async def _play(fabric: BenchFabric, plan: FabricBrownoutPlan, name: str, capacity: float) -> BrownoutRun:
    """Requests that had no first token within the objective after the last arrival are given up by their clients."""
    rng = random.Random(f"{plan.requests.seed} arrivals")
    times = [at for _, begin, end, load in plan.phases for at in arrival_times(load * capacity, begin, end, rng)]
    arrivals = [
        (at, plan.requests.stream(number, "phased", run_name=name, is_batch=rng.random() < plan.batch_share))
        for number, at in enumerate(times)
    ]
    steps: list[tuple[float, int]] = []
    watching = asyncio.create_task(_watch_step(fabric, steps), name="brownout step")
    try:
        await play_arrivals(fabric, arrivals, lambda _: True, max_wait_seconds=plan.ttft_slo_seconds)
    finally:
        watching.cancel()
        ended = await asyncio.gather(watching, return_exceptions=True)
    if isinstance(ended[0], Exception):
        raise ended[0]
    return BrownoutRun(arrivals, steps)


async def _watch_step(fabric: BenchFabric, steps: list[tuple[float, int]]) -> None:
    """Add each change of the step, until cancelled. Raises CommandError."""
    began, last = time.monotonic(), 0
    while True:
        step = await fabric.brownout_step()
        if step != last:
            steps.append((round(time.monotonic() - began, 1), step))
            last = step
        await asyncio.sleep(_POLL_SECONDS)


def is_good(stream: MeasuredStream, plan: FabricBrownoutPlan) -> bool:
    ttft = stream.ttft_seconds
    return not stream.error and ttft is not None and ttft <= plan.ttft_slo_seconds


def report_of(run: BrownoutRun, plan: FabricBrownoutPlan) -> dict[str, Any]:
    effects: dict[str, int] = {}
    for _, stream in run.arrivals:
        for effect in effects_of(stream):
            effects[effect] = effects.get(effect, 0) + 1
    return {
        "phases": [
            {"phase": name, "load": load}
            | row_of([stream for at, stream in run.arrivals if begin <= at < end], end - begin, plan)
            for name, begin, end, load in plan.phases
        ],
        "steps": list(run.steps),
        "effects": effects,
    }


def effects_of(stream: MeasuredStream) -> list[str]:
    """Returns what the ladder did to a request, by its answer's header, or by the code of its refusal."""
    if stream.error:
        return ["refused"] if stream.error_code == "brownout" else []
    return [effect.partition("=")[0].strip() for effect in stream.brownout.split(";")[1:]]


def row_of(streams: Sequence[MeasuredStream], seconds: float, plan: FabricBrownoutPlan) -> dict[str, Any]:
    """Refused are also those that were dropped from a queue; other errors are counted by themselves. A request that was
    not refused and had no first token counts in the percentiles as one that waits for ever."""
    interactive = [stream for stream in streams if not stream.is_batch]
    batch = [stream for stream in streams if stream.is_batch]
    good = [stream for stream in interactive if is_good(stream, plan)]
    refused = [stream for stream in interactive if stream.status in _REFUSED]
    ttfts = sorted(
        math.inf if stream.ttft_seconds is None else stream.ttft_seconds for stream in interactive if not stream.error
    )
    lengths = [stream.num_output_tokens for stream in interactive if stream.has_finished]
    return {
        "interactive_per_second": round(len(interactive) / seconds, 2),
        "goodput_per_second": round(len(good) / seconds, 2),
        "good_share": share_of(len(good), len(interactive)),
        "refused_share": share_of(len(refused), len(interactive)),
        "errors": sum(bool(stream.error) and stream.status not in _REFUSED for stream in streams),
        "ttft_p50": _finite(ttfts, 0.5),
        "ttft_p95": _finite(ttfts, 0.95),
        "mean_output_tokens": round(sum(lengths) / len(lengths)) if lengths else None,
        "batch_answered_share": share_of(sum(stream.has_finished for stream in batch), len(batch)),
    }


def _finite(ordered: Sequence[float], share: float) -> float | None:
    """None if the quantile is a request that never had a token."""
    value = quantile(ordered, share)
    return None if value is None or not math.isfinite(value) else round(value, 3)
