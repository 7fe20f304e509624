"""`kvloom-lab bench brownout`: what the brownout ladder makes of a time of overload."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lab.bench import brownout_model, brownout_run
from lab.bench.arrivals import Requests
from lab.bench.bench_fabric import (
    ENGINE_OR_MODELLED,
    MODELLED,
    PROFILE,
    SEED,
    SHARD_FLAGS,
    SHARD_SETTINGS,
    bench_config,
    check_engine_options,
    request_flags,
)
from lab.bench.brownout_model import BrownoutPlan
from lab.bench.brownout_run import LADDER, WITHOUT, FabricBrownoutPlan
from lab.bench.experiment import Column, Report, TableOf, count, experiment, number, show_progress
from lab.bench.plots import RunTimeline, draw_goodput

_MODELLED_SECONDS: Final = 240.0
_FABRIC_SECONDS: Final = 45.0
_MODELLED_TITLES: Final = {
    LADDER: "The default ladder (router.brownout.enabled = true)",
    "refusals_only": "Its last step alone, which refuses and degrades nothing",
    WITHOUT: "No brownout",
}
_FABRIC_TITLES: Final = {
    LADDER: "Answers of half the length, of a quarter, no batch requests and a short queue",
    WITHOUT: "No brownout",
}
_COLUMNS: Final = (
    Column("phase", "phase", is_left=True),
    Column("load", "load", "g", "x"),
    Column("asked/s", "interactive_per_second", ".1f"),
    Column("good/s", "goodput_per_second", ".1f"),
    Column("good", "good_share", ".0%"),
    Column("refused", "refused_share", ".0%"),
    Column("TTFT p50 s", "ttft_p50", ".2f"),
    Column("p95", "ttft_p95", ".2f"),
    Column("tokens", "mean_output_tokens"),
    Column("batch", "batch_answered_share", ".0%"),
)


@experiment(
    "brownout",
    ENGINE_OR_MODELLED,
    count("--shards", 1, to="num_shards"),
    PROFILE,
    number(
        "--load", 3.0, "Requests during the overload, as a multiple of what the fleet can serve.", least=0.1, most=20
    ),
    number("--ttft-slo-seconds", 2.0, "A request is good if its first token comes within this time.", above=True),
    number("--batch-share", 0.4, "Share of the requests in the batch tier.", most=1),
    number(
        "--overload-seconds",
        None,
        "How long the overload is; before it a quarter of that, and after it as long, are normal.  "
        f"[default: {_MODELLED_SECONDS:g} of virtual time, {_FABRIC_SECONDS:g} of a real engine]",
        least=4,
    ),
    *request_flags(max_tokens=48),
    *SHARD_FLAGS,
    SEED,
    plot="the share of good requests over time, and the step,",
)
def bench_brownout(engine: str, overload_seconds: float | None, **settings: Any) -> Report:
    """Measure goodput before, during and after a time of overload, with the brownout ladder and without: with the real
    router core and modelled shards in virtual time, or on fabrics of torch or simulated shards that are started for
    it."""
    check_engine_options(engine, modelled=("profile",))
    timelines: dict[str, RunTimeline] = {}
    if engine == MODELLED:
        fields = {field.name for field in dataclasses.fields(BrownoutPlan)} & settings.keys()
        plan = BrownoutPlan(
            overload_seconds=overload_seconds or _MODELLED_SECONDS, **{name: settings[name] for name in fields}
        )
        report, titles = brownout_model.run(plan, timelines), _MODELLED_TITLES
    else:
        report = _run_fabric(engine, overload_seconds or _FABRIC_SECONDS, settings, timelines)
        titles = _FABRIC_TITLES
    title = f"{report['num_shards']} x {report.get('profile', engine)}"
    begin = report["overload_seconds"] / 4
    overload = begin, begin + report["overload_seconds"]
    return Report(
        report,
        list(_parts(report, title, titles)),
        lambda path: draw_goodput(path, timelines, overload, f"TTFT within {report['ttft_slo_seconds']:g} s, {title}"),
    )


def _run_fabric(
    engine: str, overload_seconds: float, settings: Mapping[str, Any], timelines: dict[str, RunTimeline]
) -> dict[str, Any]:
    """Raises CommandError."""
    config = bench_config(engine, **{name: settings[name] for name in SHARD_SETTINGS})
    plan = FabricBrownoutPlan(
        requests=Requests(settings["num_prompt_words"], settings["max_tokens"], settings["seed"]),
        load=settings["load"],
        batch_share=settings["batch_share"],
        ttft_slo_seconds=settings["ttft_slo_seconds"],
        overload_seconds=overload_seconds,
    )
    return asyncio.run(brownout_run.run(config, plan, timelines, show_progress))


def _parts(report: Mapping[str, Any], title: str, titles: Mapping[str, str]) -> Iterator[TableOf | str]:
    yield (
        f"{title}: the fleet completes {report['capacity_per_second']:g} requests/s; objective of interactive "
        f"requests: TTFT within {report['ttft_slo_seconds']:g} s; {report['batch_share']:.0%} are batch"
    )
    for name, heading in titles.items():
        found = report[name]
        yield TableOf(_COLUMNS, found["phases"], heading)
        if found["steps"]:
            yield "steps: " + ", ".join(f"{step} at {at:g} s" for at, step in found["steps"])
            counts = ", ".join(f"{effect} {count}" for effect, count in sorted(found["effects"].items()))
            yield f"effects on requests: {counts}\n"
        if num_errors := sum(row.get("errors", 0) for row in found["phases"]):
            yield f"other errors: {num_errors}"
