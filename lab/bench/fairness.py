"""`kvloom-lab bench fairness`: what a tenant that floods the fleet costs another one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from lab.bench import fairness_model, fairness_run
from lab.bench.arrivals import Requests
from lab.bench.bench_fabric import (
    ENGINE_OR_MODELLED,
    MODELLED,
    POLICY,
    PROFILE,
    SEED,
    SHARD_FLAGS,
    SHARD_SETTINGS,
    bench_config,
    check_engine_options,
    request_flags,
)
from lab.bench.experiment import Column, Report, TableOf, count, experiment, number, show_progress
from lab.bench.fairness_model import FairnessPlan
from lab.bench.fairness_run import FabricFairnessPlan
from tools.failures import CommandError
from tools.simulate.plot import draw
from tools.simulate.runs import Curves

_MODELLED_SECONDS: Final = 120.0
_MIN_MODELLED_SECONDS: Final = 20.0
_FABRIC_SECONDS: Final = 40.0
_ERRORS: Final = Column("errors", "errors")
"""Modelled shards report none."""
_COLUMNS: Final = (
    Column("the calm tenant", "run", is_left=True),
    Column("requests", "requests"),
    Column("answered", "answered"),
    _ERRORS,
    Column("tokens/s", "tokens_per_second", ".0f"),
    Column("TTFT p50 s", "ttft_p50", ".2f"),
    Column("p99", "ttft_p99", ".2f"),
)


@experiment(
    "fairness",
    ENGINE_OR_MODELLED,
    count("--shards", 2, to="num_shards"),
    PROFILE,
    POLICY,
    number("--calm-load", 0.2, "The calm tenant asks for this share of what the fleet can serve.", most=1, above=True),
    number("--flood-factor", 10.0, "How many times as much the other tenant asks for.", above=True),
    number(
        "--seconds",
        None,
        "How long requests arrive, in each run.  [default: 120 of virtual time, 40 of a real engine]",
        least=4,
    ),
    number("--competing-prefill-seconds", None, "In place of the router's default; 0: no limit."),
    *request_flags(max_tokens=16),
    *SHARD_FLAGS,
    SEED,
    plot="the distribution of the calm tenant's TTFT",
)
def bench_fairness(engine: str, seconds: float | None, **settings: Any) -> Report:
    """Measure how much later a calm tenant's answers begin beside one that floods the fleet than alone: with the real
    router core and modelled shards in virtual time, so that the figures are the same on every machine, or on a fabric
    of torch or simulated shards that is started for it."""
    check_engine_options(engine, modelled=("profile",))
    curves: dict[str, Curves] = {}
    if engine == MODELLED:
        report = _run_modelled(_MODELLED_SECONDS if seconds is None else seconds, settings, curves)
    else:
        report = _run_fabric(engine, _FABRIC_SECONDS if seconds is None else seconds, settings, curves)
    title = f"{report['num_shards']} x {report.get('profile', engine)}, {report['policy']}"
    served = f"beside the flood, the fleet served {report['served_tokens_per_second']:.0f} tokens/s of both"
    if "served_as_one_tokens_per_second" in report:
        served += f", and {report['served_as_one_tokens_per_second']:.0f} as one tenant"
    parts: list[TableOf | str] = [
        f"{title}: the fleet completes {report['capacity_per_second']:g} requests/s; the calm tenant asks for "
        f"{report['calm_load']:.0%} of that, the other for {report['flood_factor']:g} times as much",
        TableOf([one for one in _COLUMNS if one is not _ERRORS or "errors" in report["rows"][0]], report["rows"]),
        served,
    ]
    if report["ttft_p99_rise"] is not None:
        parts.append(f"TTFT p99 beside the flood: {report['ttft_p99_rise']:+.0%} against alone")
    return Report(report, parts, lambda path: draw(path, curves, f"TTFT of the calm tenant, {title}"))


def _run_modelled(seconds: float, settings: Mapping[str, Any], curves: dict[str, Curves]) -> dict[str, Any]:
    """Raises CommandError."""
    if seconds < _MIN_MODELLED_SECONDS:
        raise CommandError(f"--seconds: at least {_MIN_MODELLED_SECONDS:g} with modelled shards")
    fields = {field.name for field in dataclasses.fields(FairnessPlan)} & settings.keys()
    plan = FairnessPlan(seconds=seconds, **{name: settings[name] for name in fields})
    return fairness_model.run(plan, curves)


def _run_fabric(engine: str, seconds: float, settings: Mapping[str, Any], curves: dict[str, Curves]) -> dict[str, Any]:
    """Raises CommandError."""
    config = bench_config(engine, **{name: settings[name] for name in SHARD_SETTINGS})
    config.router.placement.policy = settings["policy"]
    if settings["competing_prefill_seconds"] is not None:
        config.router.fairness.competing_prefill_seconds = settings["competing_prefill_seconds"]
    plan = FabricFairnessPlan(
        requests=Requests(settings["num_prompt_words"], settings["max_tokens"], settings["seed"]),
        calm_load=settings["calm_load"],
        flood_factor=settings["flood_factor"],
        seconds=seconds,
    )
    return asyncio.run(fairness_run.run(config, plan, curves, show_progress))
