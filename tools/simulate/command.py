"""`kvloom simulate`: replays a trace through the real router core and modelled shards."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
from rich.console import Console

from kvloom_common.plugins import PluginError
from router.core.placement import POLICIES
from router.placement_plugins import PLACEMENT_POLICIES, plugin_policy
from tools.failures import CommandError
from tools.options import option
from tools.simulate.decisions import RECORDED, Replay, read_decision_log
from tools.simulate.fleet.fleet import ModelFleet
from tools.simulate.fleet.models_option import parse_models, parse_shares
from tools.simulate.fleet.profile import Profile, load_profile
from tools.simulate.plot import check_plot_file, draw
from tools.simulate.rows import add_distances, measure_capacities, measure_runs, recorded_row
from tools.simulate.runs import (
    BOUND,
    POOL,
    EngineOrder,
    RunSpec,
    TraceSource,
)
from tools.simulate.statistics import BATCH_SLO, Slo
from tools.simulate.table import print_calibration, print_table
from tools.simulate.traces import FORMATS, MAX_THINK_SECONDS, OPEN_LOOP_FORMATS, TraceFormat, guess_format

DEFAULT_USERS: Final = 80
DEFAULT_SHARDS: Final = 8
DEFAULT_PROFILE: Final = "70b"
_MAX_SEEDS: Final = 100
_FILE_WIDTH: Final = 200
"""The width in columns of a table that is not printed to a terminal."""


@click.command("simulate")
@option(
    "--trace",
    "trace_file",
    scope="simulate",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A file of recorded calls, which may be gzipped.",
)
@option(
    "--decisions",
    "decision_file",
    scope="simulate",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The decision file of a router, used instead of a trace for requests, shards and speeds. FILE.1 is also read.",
)
@option(
    "--format",
    "trace_format",
    scope="simulate",
    type=click.Choice(FORMATS),
    help="The format of the trace. By default it is derived from the name of the file.",
)
@option(
    "--shards",
    scope="simulate",
    type=click.IntRange(1, 4096),
    help=f"The number of shards.  [default: {DEFAULT_SHARDS}, or as in the decision file]",
)
@option(
    "--models",
    "models_text",
    scope="simulate",
    metavar="MODEL=SHARDS,...",
    help="A fleet of several models, each with so many shards. The trace names the model of each call, unless "
    "--model-shares divides them.",
)
@option(
    "--model-shares",
    "shares_text",
    scope="simulate",
    metavar="MODEL=SHARE,...",
    help="Divide the sessions of the trace between the models by a stable hash, whatever models it names.",
)
@option(
    "--profile",
    "profile_name",
    scope="simulate",
    metavar="8b|8b-h100|70b|FILE",
    help="The model and machine of a shard, or MODEL=PROFILE,... with --models. A FILE is JSON or TOML.  "
    f"[default: {DEFAULT_PROFILE}, or as in the decision file]",
)
@option(
    "--rate",
    scope="simulate",
    type=click.FloatRange(0, 1e6, min_open=True),
    help="The multiple of the recorded rate (mooncake, azure, decisions).  [default: 1]",
)
@option(
    "--users",
    scope="simulate",
    type=click.IntRange(1, 1_000_000),
    help=f"The number of concurrent users, each with a session (weka).  [default: {DEFAULT_USERS}]",
)
@option(
    "--max-think",
    "max_think_seconds",
    scope="simulate",
    type=click.FloatRange(0),
    default=MAX_THINK_SECONDS,
    show_default=True,
    help="Longer think times are cut to this many seconds (weka). With inf none is.",
)
@option(
    "--policy",
    "policy_names",
    scope="simulate",
    default="ect",
    show_default=True,
    help="The name of a policy, several names separated by commas, or all. The bounds are always shown too.",
)
@option(
    "--batch-share",
    scope="simulate",
    type=click.FloatRange(0, 0.95, max_open=True),
    default=0.0,
    show_default=True,
    help="Add batch jobs to the trace, with long prompts and answers, so that they are this share of the requests "
    "(mooncake, azure). Figures are then shown for each class too.",
)
@option(
    "--ignore-classes",
    scope="simulate",
    is_flag=True,
    help="Tell neither routers nor shards which requests are batch.",
)
@option("--seed", scope="simulate", type=int, default=0, show_default=True, help="The first seed.")
@option(
    "--seeds",
    scope="simulate",
    type=click.IntRange(1, _MAX_SEEDS),
    default=1,
    show_default=True,
    help="The number of seeds. Figures are means, with half their range.",
)
@option(
    "--capacity-blocks",
    scope="simulate",
    type=click.IntRange(1),
    help="The number of KV blocks of a shard.  [default: the capacity in the profile]",
)
@option(
    "--staleness",
    "staleness_seconds",
    scope="simulate",
    type=click.FloatRange(0, 3600),
    default=0.0,
    show_default=True,
    help="The age in seconds of load reports and KV events at the router.",
)
@option(
    "--routers",
    scope="simulate",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="The number of routers.",
)
@option(
    "--engine-order",
    scope="simulate",
    type=click.Choice(["fcfs", "shortest_prefill"]),
    default="fcfs",
    show_default=True,
    help="The order of the waiting queue of a shard.",
)
@option(
    "--peer-fetch",
    "peer_fetch_gbps",
    scope="simulate",
    type=click.FloatRange(0, 1e6),
    default=0.0,
    show_default=True,
    metavar="GBPS",
    help="The bandwidth in GB/s at which a shard fetches KV blocks from another one. With 0 it does not.",
)
@option(
    "--speed-factors",
    scope="simulate",
    metavar="X,X,...",
    help="How many times slower than the profile each shard is.  [default: 1 for all]",
)
@option(
    "--max-requests",
    scope="simulate",
    type=click.IntRange(1),
    help="The number of requests to replay.  [default: all in the trace]",
)
@option(
    "--block-size",
    scope="simulate",
    type=click.IntRange(1, 65536),
    help="The number of tokens in a KV block (azure; the other formats define it).  [default: 512]",
)
@option(
    "--slo-ttft",
    scope="simulate",
    type=click.FloatRange(0, min_open=True),
    default=2.0,
    show_default=True,
    help="The SLO for the time to first token, in seconds.",
)
@option(
    "--slo-tpot",
    scope="simulate",
    type=click.FloatRange(0, min_open=True),
    default=0.1,
    show_default=True,
    help="The SLO for the mean time per output token, in seconds.",
)
@option(
    "--slo-batch-ttft",
    scope="simulate",
    type=click.FloatRange(0, min_open=True),
    default=BATCH_SLO.ttft_seconds,
    show_default=True,
    help="The same for batch requests, with --batch-share.",
)
@option(
    "--slo-batch-tpot",
    scope="simulate",
    type=click.FloatRange(0, min_open=True),
    default=BATCH_SLO.tpot_seconds,
    show_default=True,
    help="The same for batch requests, with --batch-share.",
)
@option(
    "--capacity",
    "with_capacity",
    scope="simulate",
    is_flag=True,
    help="Find the highest rate, or number of users, at which 90% of requests meet the SLO.",
)
@option(
    "--plot",
    "plot_file",
    scope="simulate",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Plot TTFT distributions and timelines to this .svg or .png file.",
)
@option(
    "--jobs", scope="simulate", type=click.IntRange(1, 1024), help="The number of processes.  [default: one per core]"
)
@option("--json", "as_json", scope="simulate", is_flag=True, help="Print a JSON array with an object for each policy.")
def simulate_command(
    trace_file: Path | None,
    decision_file: Path | None,
    trace_format: TraceFormat | None,
    shards: int | None,
    models_text: str | None,
    shares_text: str | None,
    profile_name: str | None,
    rate: float | None,
    users: int | None,
    max_think_seconds: float,
    policy_names: str,
    batch_share: float,
    ignore_classes: bool,
    seed: int,
    seeds: int,
    capacity_blocks: int | None,
    staleness_seconds: float,
    routers: int,
    engine_order: EngineOrder,
    peer_fetch_gbps: float,
    speed_factors: str | None,
    max_requests: int | None,
    block_size: int | None,
    slo_ttft: float,
    slo_tpot: float,
    slo_batch_ttft: float,
    slo_batch_tpot: float,
    with_capacity: bool,
    plot_file: Path | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Replay a trace through the real router core and modelled shards, in virtual time."""
    if plot_file is not None:
        check_plot_file(plot_file)
    source = _choose_source(trace_file, decision_file, trace_format, block_size, max_think_seconds)
    load = _choose_load(source, rate, users)
    if batch_share and source.format not in OPEN_LOOP_FORMATS:
        raise CommandError(f"--batch-share is for {' and '.join(OPEN_LOOP_FORMATS)} traces")
    if ignore_classes and not batch_share:
        raise CommandError("--ignore-classes is for --batch-share: without batch requests there is one class")
    replay = None
    if decision_file is not None:
        if block_size is not None:
            raise CommandError("--block-size is for azure traces: decision files define the block size")
        replay = read_decision_log(decision_file)
        _print_notes(replay)
    models = _choose_models(models_text, shares_text, shards, decision_file, profile_name, capacity_blocks)
    num_shards = shards or (replay.fleet.num_shards if replay else DEFAULT_SHARDS)
    if models:
        num_shards = sum(model.num_shards for model in models)
    run = RunSpec(
        trace=source,
        load=load,
        policy="",
        profile=_choose_profile(models, replay, profile_name),
        num_shards=num_shards,
        models=models,
        model_shares=parse_shares(shares_text, models) if shares_text else (),
        max_requests=max_requests,
        num_routers=routers,
        capacity_blocks=capacity_blocks or (replay.fleet.capacity_blocks if replay else None),
        staleness_seconds=staleness_seconds,
        engine_order=engine_order,
        peer_fetch_bytes_per_second=peer_fetch_gbps * 1e9,
        speed_factors=_parse_speed_factors(speed_factors, num_shards)
        if speed_factors is not None or replay is None
        else replay.fleet.factors_of(num_shards),
        slo=Slo(slo_ttft, slo_tpot),
        batch_share=batch_share,
        batch_slo=Slo(slo_batch_ttft, slo_batch_tpot),
        has_classes=not ignore_classes,
        with_curves=plot_file is not None,
    )
    in_force = replay.policy if replay and replay.policy in PLACEMENT_POLICIES.names() else None
    policies = _parse_policies(f"{in_force},{policy_names}" if in_force else policy_names)
    if with_capacity:
        policies.remove(POOL)  # it bounds no goodput
    chosen_seeds = range(seed, seed + seeds)
    num_processes = jobs or os.cpu_count() or 1
    measure = measure_capacities if with_capacity else measure_runs
    rows, first_runs = measure(run, policies, chosen_seeds, num_processes)
    if replay is not None:
        figures, calibration = replay.recorded(run.slo, max_requests)
        recorded = recorded_row(RECORDED, figures, calibration, with_capacity=with_capacity)
        rows = [recorded, *({**row, "in_force": row["policy"] == in_force} for row in rows)]
    add_distances(rows)
    shown = [f"{model.name}: {model.num_shards} × {model.profile.name}" for model in models]
    fleet = f"{Path(source.path).name}, {', '.join(shown) or f'{num_shards} × {run.profile.name}'}"
    if as_json:
        click.echo(json.dumps(rows))
    else:
        shown_load = f"{load:.0f} users" if source.format == "weka" else f"rate ×{load:g}"
        title = fleet if with_capacity else f"{fleet}, {shown_load}"
        if batch_share:
            title += f", {batch_share:.0%} batch" + (", classes ignored" if ignore_classes else "")
        console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False)
        print_table(rows, title, console)
        print_calibration(rows, console)
    if plot_file is not None:
        curves = {policy: report.curves for policy, report in first_runs.items() if report.curves is not None}
        draw(plot_file, curves, f"{fleet}, seed {seed}")


def _choose_models(
    text: str | None,
    shares: str | None,
    shards: int | None,
    decision_file: Path | None,
    profile_name: str | None,
    capacity_blocks: int | None,
) -> tuple[ModelFleet, ...]:
    """() for one model. Raises CommandError."""
    if text is None:
        if shares is not None:
            raise CommandError("--model-shares is for fleets of several models: give --models")
        return ()
    if decision_file is not None:
        raise CommandError("--models is for traces: of a decision file the most requested model is replayed")
    if shards is not None:
        raise CommandError("--shards is for one model: --models has the number of shards of each")
    return parse_models(text, profile_name or DEFAULT_PROFILE, capacity_blocks)


def _choose_profile(models: Sequence[ModelFleet], replay: Replay | None, name: str | None) -> Profile:
    """That of the only model. Raises CommandError."""
    if models:
        return models[0].profile  # each has its own
    return replay.fleet.profile if replay and not name else load_profile(name or DEFAULT_PROFILE)


def _choose_source(
    trace_file: Path | None,
    decision_file: Path | None,
    trace_format: TraceFormat | None,
    block_size: int | None,
    max_think_seconds: float,
) -> TraceSource:
    if decision_file is not None:
        if trace_file is not None or trace_format is not None:
            raise CommandError("--decisions cannot be combined with --trace and --format")
        return TraceSource(path=str(decision_file), format="decisions")
    if trace_file is None:
        raise click.UsageError("give either --trace or --decisions")
    return TraceSource(
        path=str(trace_file),
        format=trace_format or guess_format(trace_file),
        block_size=block_size,
        max_think_seconds=max_think_seconds,
    )


def _choose_load(source: TraceSource, rate: float | None, users: int | None) -> float:
    if source.format == "weka":
        if rate is not None:
            raise CommandError("--rate is for mooncake, azure and decisions; the load of weka is --users")
        return float(users or DEFAULT_USERS)
    if users is not None:
        raise CommandError(f"--users is for weka traces; the load of {source.format} is --rate")
    return rate or 1.0


def _print_notes(replay: Replay) -> None:
    notes = list(replay.notes)
    if replay.policy not in PLACEMENT_POLICIES.names():
        notes.append(
            f"the policy in force, {replay.policy!r}, does not exist in this version of kvloom: it is not replayed"
        )
    for note in notes:
        click.echo(f"note: {note}", err=True)


def _parse_policies(names: str) -> list[str]:
    """Returns each policy once, and the bounds last. Raises CommandError, also for a plugin that cannot be used."""
    existing = PLACEMENT_POLICIES.names()
    chosen: list[str] = []
    for name in (part.strip() for part in names.split(",")):
        if name == "all":
            chosen += [*POLICIES, *(plugin for plugin in existing if plugin not in POLICIES)]
        elif name in existing:
            chosen.append(name)
        elif name not in (POOL, BOUND):
            raise CommandError(
                f"--policy {name}: there is no such policy; there are {', '.join(existing)}, {POOL}, {BOUND} and all"
            )
    for name in chosen:
        _check_policy(name)
    return [*dict.fromkeys(chosen), POOL, BOUND]


def _check_policy(name: str) -> None:
    try:
        new_policy = plugin_policy(name)
        if new_policy is not None:
            new_policy()
    except PluginError as error:
        raise CommandError(f"--policy {name}: {error}") from error


def _parse_speed_factors(text: str | None, num_shards: int) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        factors = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise CommandError(f"--speed-factors {text}: not numbers separated by commas") from error
    if len(factors) != num_shards or not all(0 < factor < 1e6 for factor in factors):
        raise CommandError(f"--speed-factors {text}: expected {num_shards} positive numbers, one for each shard")
    return factors
