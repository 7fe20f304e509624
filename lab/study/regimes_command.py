"""`kvloom-lab bench regimes`: policies, or versions of the code, where KV memory and decoding decide."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from lab.flags import count, flag, flags, number
from lab.pages import PAGE, markdown_table
from lab.study.pairs import Interval, compare_differences, compare_ratios
from lab.study.plan import DEFAULT_POLICY, RIVALS, StudyPlan
from lab.study.regimes import REGIMES, write_trace
from tools.failures import CommandError
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.parallel import perform_all
from tools.simulate.runs import BOUND, POOL, ProgressCallback, RunReport, RunSpec, perform_run

_HALF_MEMORY: Final = PROFILES["70b"].capacity_tokens // 64 // 2
WEKA_RUNS: Final[Mapping[str, tuple[int, int | None]]] = {
    "weka-80": (80, None),
    "weka-110": (110, None),
    "weka-80-half": (80, _HALF_MEMORY),
}
"""Users, and KV blocks of a shard."""


class Draw(msgspec.Struct, frozen=True):
    """One draw of a workload, under one policy."""

    label: str
    """The version of the code."""
    workload: str
    policy: str
    seed: int


class DrawJob(msgspec.Struct, frozen=True):
    draw: Draw
    spec: RunSpec
    time_share: float
    """The part of a synthetic workload that is run."""


class DrawResult(msgspec.Struct, frozen=True):
    """The figures of a draw, times in seconds."""

    draw: Draw
    ttft_mean: float
    ttft_p99: float
    goodput: float
    router_microseconds: float


def perform_draw(job: DrawJob, report_progress: ProgressCallback) -> RunReport:
    if job.draw.workload not in REGIMES:
        return perform_run(job.spec, report_progress)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{job.draw.workload}-{job.draw.seed}.jsonl"
        write_trace(path, job.draw.workload, job.draw.seed, job.time_share)
        trace = msgspec.structs.replace(job.spec.trace, path=str(path))
        return perform_run(msgspec.structs.replace(job.spec, trace=trace), report_progress)


@click.command("regimes")
@click.argument("names", nargs=-1, metavar="[WORKLOAD]...")
@flags(
    "regimes",
    flag("--seeds", str, "1-8", "The draws.", metavar="FIRST-LAST"),
    number(
        "--share",
        1.0,
        "The part of each synthetic workload that is run, from its beginning.",
        most=1,
        above=True,
        to="time_share",
    ),
    flag("--policy", str, DEFAULT_POLICY, "Policies.", metavar="NAME,...|all", to="policies"),
    flag(
        "--results",
        click.Path(path_type=Path, dir_okay=False),
        None,
        "A file to keep figures in. What it has under the label is not done again.",
        to="results_file",
        required=True,
    ),
    flag("--label", str, "now", "A name for this version of the code."),
    flag("--against", str, None, "Compare with the draws of this version, pair by pair.", metavar="LABEL"),
    flag("--mooncake", PAGE, None, "Mooncake's conversation trace, as one more workload."),
    flag("--weka", PAGE, None, "WEKA's sessions, as three more workloads."),
    count("--max-requests", 4000, "The number of requests of these traces."),
    count("--jobs", None, "Processes.  [default: one per core]", most=1024),
)
def regimes_command(
    names: Sequence[str],
    seeds: str,
    time_share: float,
    policies: str,
    results_file: Path,
    label: str,
    against: str | None,
    mooncake: Path | None,
    weka: Path | None,
    max_requests: int,
    jobs: int | None,
) -> None:
    """Simulate workloads in which KV memory and decoding decide, in many draws, and compare them pair by pair."""
    workloads = _workloads(mooncake, weka, max_requests)
    chosen = list(names) or list(workloads)
    for name in chosen:
        if name not in workloads:
            raise CommandError(f"{name}: no such workload; there are {', '.join(workloads)}")
    chosen_policies = [DEFAULT_POLICY, *RIVALS, POOL, BOUND] if policies == "all" else policies.split(",")
    draws, results = _parse_seeds(seeds), _read(results_file)
    missing = [
        DrawJob(draw, msgspec.structs.replace(workloads[name], policy=policy, seed=seed), time_share)
        for name in chosen
        for seed in draws
        for policy in chosen_policies
        if (draw := Draw(label, name, policy, seed)) not in results
    ]

    def keep(job: DrawJob, report: RunReport) -> None:
        found = report.statistics
        result = DrawResult(
            job.draw, found.ttft_mean or 0.0, found.ttft_p99 or 0.0, found.goodput, found.router_microseconds
        )
        results[job.draw] = result
        with results_file.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")

    titles = [f"{job.draw.workload}, {job.draw.policy}, seed {job.draw.seed}" for job in missing]
    perform_all(perform_draw, missing, titles, jobs or os.cpu_count() or 1, keep)
    shown = [result for result in results.values() if result.draw.seed in draws]
    click.echo(render_policies(shown, label, chosen, chosen_policies))
    if against is not None:
        click.echo("\n" + render_versions(shown, label, against, chosen, chosen_policies[0]))


def _workloads(mooncake: Path | None, weka: Path | None, max_requests: int) -> dict[str, RunSpec]:
    """Each workload's run, of which policy and seed are replaced. Those of regimes have no trace yet."""
    found = {name: regime.run() for name, regime in REGIMES.items()}
    plan = StudyPlan(str(mooncake or ""), str(weka or ""))
    if mooncake is not None:
        found["mooncake"] = msgspec.structs.replace(plan.mooncake, max_requests=max_requests)
    if weka is not None:
        for name, (users, num_blocks) in WEKA_RUNS.items():
            run = plan.weka(users)
            found[name] = msgspec.structs.replace(run, max_requests=max_requests, capacity_blocks=num_blocks)
    return found


def _parse_seeds(text: str) -> range:
    first, _, last = text.partition("-")
    try:
        return range(int(first), int(last or first) + 1)
    except ValueError:
        raise CommandError(f"--seeds {text}: not FIRST-LAST") from None


def _read(path: Path) -> dict[Draw, DrawResult]:
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
        results = [msgspec.json.decode(line, type=DrawResult) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise CommandError(f"{path}: {error}") from error
    return {result.draw: result for result in results}


def render_policies(
    results: Iterable[DrawResult], label: str, workloads: Sequence[str], policies: Sequence[str]
) -> str:
    """Means over the draws: TTFT in seconds and goodput of each policy, and the first one against the best other one
    of each draw, by TTFT and by goodput, and against the pool."""
    heads = ["workload", *policies]
    rivals = [policy for policy in policies[1:] if policy not in (POOL, BOUND)]
    heads += ["TTFT / best other", "goodput - best other"] if rivals else []
    heads += ["TTFT / pool"] if POOL in policies else []
    rows: list[list[str]] = []
    for name in workloads:
        of_policy = {policy: _draws(results, label, name, policy) for policy in policies}
        row = [name, *(_means(draws) for draws in of_policy.values())]
        ours = of_policy[policies[0]]
        if rivals:
            others = [of_policy[policy] for policy in rivals]
            row.append(_ratio(compare_ratios(_ttfts(ours), _best(map(_ttfts, others), min))))
            row.append(_difference(compare_differences(_goodputs(ours), _best(map(_goodputs, others), max))))
        if POOL in policies:
            row.append(_ratio(compare_ratios(_ttfts(ours), _ttfts(of_policy[POOL]))))
        rows.append(row)
    return markdown_table(heads, rows)


def render_versions(
    results: Iterable[DrawResult], label: str, other: str, workloads: Sequence[str], policy: str
) -> str:
    """One version of the code against another under one policy."""
    heads = ["workload", "pairs", other, label, "TTFT", "goodput"]
    rows: list[list[str]] = []
    for name in workloads:
        ours, theirs = _draws(results, label, name, policy), _draws(results, other, name, policy)
        seeds = ours.keys() & theirs.keys()
        if not seeds:
            continue
        ours, theirs = ({seed: one[seed] for seed in seeds} for one in (ours, theirs))
        ratio = compare_ratios(_ttfts(ours), _ttfts(theirs))
        change = compare_differences(_goodputs(ours), _goodputs(theirs))
        rows.append([name, str(len(seeds)), _means(theirs), _means(ours), _ratio(ratio), _difference(change)])
    return markdown_table(heads, rows)


def _draws(results: Iterable[DrawResult], label: str, workload: str, policy: str) -> dict[int, DrawResult]:
    return {
        one.draw.seed: one
        for one in results
        if (one.draw.label, one.draw.workload, one.draw.policy) == (label, workload, policy)
    }


def _ttfts(draws: Mapping[int, DrawResult]) -> dict[int, float]:
    return {seed: one.ttft_mean for seed, one in draws.items()}


def _goodputs(draws: Mapping[int, DrawResult]) -> dict[int, float]:
    return {seed: one.goodput for seed, one in draws.items()}


def _best(figures: Iterable[Mapping[int, float]], best: Callable[[Iterable[float]], float]) -> dict[int, float]:
    """The best of several policies in each draw that all have."""
    every = list(figures)
    return {seed: best(one[seed] for one in every) for seed in every[0] if all(seed in one for one in every)}


def _means(draws: Mapping[int, DrawResult]) -> str:
    if not draws:
        return "-"
    ttft, goodput = (statistics.fmean(values.values()) for values in (_ttfts(draws), _goodputs(draws)))
    return f"{ttft:.3f}, {goodput:.3f}"


def _ratio(interval: Interval) -> str:
    """A ratio with its confidence interval."""
    low, high = (math.exp(interval.mean + sign * interval.half_width) for sign in (-1, 1))
    return f"{math.exp(interval.mean):.3f} ({low:.2f} to {high:.2f})"


def _difference(interval: Interval) -> str:
    return f"{interval.mean:+.3f} ±{interval.half_width:.3f}"
