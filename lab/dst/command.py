"""`kvloom-lab dst`: simulates the router core under faults, from seeds."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lab.dst.campaign import Summary, run_campaign
from lab.dst.environment import MAX_TRACE
from lab.dst.replay import read_bundle, replay
from lab.dst.run_seed import Failure, SeedResult, run_seed
from lab.dst.trace import join_lines
from lab.flags import JSON, choice, count, flag, flags, switch
from router.core.placement import POLICIES

_MAX_EVENT: Final = 500
"""Characters of an event that are shown."""


@click.command()
@flags(
    "dst",
    count("--seeds", None, "The number of seeds to run.  [default: 1000, or 1 with --seed]", to="num_seeds"),
    count("--seed", None, "The first seed.  [default: 0]", least=0, to="first_seed"),
    count("--jobs", None, "The number of processes.  [default: one per core]", to="num_jobs"),
    switch("--trace", f"Print the history (the last {MAX_TRACE:,} events). Requires a single seed."),
    switch(
        "--limits",
        "Tenants have limits and budgets in all seeds, not only in some, and their owners (Redis, control) fail too.",
        to="with_limits",
    ),
    flag(
        "--replay",
        click.Path(path_type=Path, exists=True, dir_okay=False),
        None,
        "Decide the events of a bundle (`kvloom incident capture`) again, and name the first decision that differs.",
        to="bundle",
    ),
    choice("--policy", sorted(POLICIES), None, "With --replay: place by this policy."),
    JSON,
)
def dst(
    num_seeds: int | None,
    first_seed: int | None,
    num_jobs: int | None,
    trace: bool,
    with_limits: bool,
    bundle: Path | None,
    policy: str | None,
    as_json: bool,
) -> None:
    """Run deterministic simulation tests: the real router core among simulated shards, clients, links and clocks that
    fail as the seed determines. Every invariant is checked after every step. A failing seed always fails in the same
    way."""
    if bundle is not None:
        _replay(bundle, policy, as_json=as_json)
        return
    if num_seeds is None:
        num_seeds = 1000 if first_seed is None else 1
    if trace and num_seeds > 1:
        raise click.UsageError("--trace is for one seed: give --seed and leave --seeds out")
    seeds = range(first_seed or 0, (first_seed or 0) + num_seeds)
    begin = time.monotonic()
    num_jobs = num_jobs or os.cpu_count() or 1
    summary = _run_traced(seeds[0], with_limits) if trace else _run_with_progress(seeds, num_jobs, with_limits)
    if as_json:
        print(json.dumps({**summary.to_json(), "wall_seconds": round(time.monotonic() - begin, 1)}, indent=2))
    else:
        _print_summary(summary, time.monotonic() - begin)
    for failure in sorted(summary.failures, key=lambda failure: failure.seed):
        _print_failure(failure)
    if summary.failures:
        sys.exit(1)


def _replay(bundle: Path, policy: str | None, *, as_json: bool) -> None:
    run = read_bundle(bundle)
    began = time.process_time()
    result = replay(run, policy)
    if as_json:
        print(json.dumps(dataclasses.asdict(result)))
    else:
        print(
            f"{result.num_events:,} of {len(run.lines):,} events, {run.num_seconds:,.1f} s of {run.versions}, again in "
            f"{time.process_time() - began:.1f} s"
        )
        if result.difference is None:
            print(f"all {result.num_decisions:,} decisions are the same")
        else:
            first = result.difference
            print(f"the first decision that differs is at event {first.number}, after {first.at_seconds:.4f} s")
            print(f"  event:    {first.event[:_MAX_EVENT]}\n  recorded: {first.recorded}\n  now:      {first.now}")
        if result.broken:
            print(f"the core fails: {result.broken}")
    if result.difference is not None or result.broken:
        sys.exit(1)


def _run_traced(seed: int, with_limits: bool) -> Summary:
    history: list[str] = []
    result = run_seed(seed, history=history, with_limits=with_limits or None)
    print("\n".join(history))
    summary = Summary()
    summary.add(result)
    return summary


def _run_with_progress(seeds: range, num_jobs: int, with_limits: bool) -> Summary:
    columns = (
        TextColumn("dst"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("seeds, {task.fields[failures]} failed"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("dst", total=len(seeds), failures=0)
        num_failures = 0

        def note(result: SeedResult) -> None:
            nonlocal num_failures
            num_failures += result.failure is not None
            progress.update(bar, advance=1, failures=num_failures)

        return run_campaign(seeds, num_jobs, note, with_limits=with_limits)


def _print_summary(summary: Summary, wall_seconds: float) -> None:
    print(
        f"{summary.num_seeds:,} seeds, {len(summary.failures)} failed: {summary.num_events:,} events, "
        f"{summary.num_requests:,} requests, {summary.num_tokens:,} tokens read, {sum(summary.faults.values()):,} "
        f"faults in {summary.virtual_seconds / 3600:,.1f} h of virtual time, {wall_seconds:.1f} s of real time"
    )
    print("faults: " + ", ".join(f"{kind} {count:,}" for kind, count in sorted(summary.faults.items())))


def _print_failure(failure: Failure) -> None:
    print(
        f"\nseed {failure.seed} broke {failure.invariant} at event {failure.num_events}, {failure.at_seconds:.4f} s: "
        f"{failure.detail}",
        file=sys.stderr,
    )
    print(join_lines(failure.history), file=sys.stderr)
    print(f"replay: {failure.replay} (with --trace for the whole history)", file=sys.stderr)
