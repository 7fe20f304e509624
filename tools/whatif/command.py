"""`kvloom whatif`: what would have happened to each tenant."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

from kvloom_common.plugins import PluginError
from kvloom_common.tenancy.prices import Prices, decimal
from tools.failures import CommandError
from tools.options import option
from tools.simulate.decisions import read_decision_log
from tools.simulate.fleet.profile import load_profile
from tools.simulate.parallel import RunDisplay
from tools.whatif.changes import last_prices, read_limits, read_prices
from tools.whatif.prediction import ALL, TenantFigures, WhatIf, by_tenant, predict, recorded

_FILE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


_COLUMNS: Final[Mapping[str, Callable[[TenantFigures], str]]] = {
    "requests": lambda one: f"{one.requests:,}",
    "429": lambda one: f"{one.refused:,}",
    "failed": lambda one: f"{one.failed:,}",
    "TTFT p50 s": lambda one: _seconds(one.ttft_p50),
    "p99": lambda one: _seconds(one.ttft_p99),
    "output tokens": lambda one: f"{one.num_output_tokens:,}",
    "bill": lambda one: decimal(one.cost_nanos),
}


@click.command("whatif")
@option(
    "--decisions",
    "decision_file",
    scope="whatif",
    type=_FILE,
    required=True,
    help="The decision file of a router (`router.decision_log.path`). FILE.1 is also read.",
)
@option(
    "--limits",
    "limits_file",
    scope="whatif",
    type=_FILE,
    help="All limits that there would be: JSON or TOML, by account.  [default: none but those that refused requests, "
    "which are refused again]",
)
@option("--policy", scope="whatif", help="The name of a placement policy.  [default: as in the decision file]")
@option(
    "--price",
    "price_file",
    scope="whatif",
    type=_FILE,
    help="Prices, as `kvloom prices list --json` prints them. What is recorded is billed with those in force then, and "
    "what is predicted with the last of each model.",
)
@option(
    "--shards",
    scope="whatif",
    type=click.IntRange(1, 4096),
    help="The number of shards.  [default: as in the decision file]",
)
@option(
    "--profile",
    "profile_name",
    scope="whatif",
    metavar="8b|8b-h100|70b|FILE",
    help="The model and machine of a shard, as for `kvloom simulate`.  [default: as in the decision file]",
)
@option(
    "--rate",
    scope="whatif",
    type=click.FloatRange(0, 1e6, min_open=True),
    default=1.0,
    show_default=True,
    help="The multiple of the recorded rate.",
)
@option("--seed", scope="whatif", type=int, default=0, show_default=True, help="The seed of the router.")
@option("--json", "as_json", scope="whatif", is_flag=True, help="Print a JSON array with an object for each tenant.")
def whatif(
    decision_file: Path,
    limits_file: Path | None,
    policy: str | None,
    price_file: Path | None,
    shards: int | None,
    profile_name: str | None,
    rate: float,
    seed: int,
    as_json: bool,
) -> None:
    """Replay a router's decisions under other limits, prices, policy or fleet: the 429s, the time to first token and
    the bill of each tenant, as recorded and as predicted."""
    replay = read_decision_log(decision_file)
    for note in replay.notes:
        click.echo(f"note: {note}", err=True)
    tenants = {request.call.tenant for request in (*replay.requests, *replay.refused)} - {""}
    prices = [] if price_file is None else read_prices(price_file)
    change = WhatIf(
        policy=policy or replay.policy,
        profile=load_profile(profile_name) if profile_name else replay.fleet.profile,
        num_shards=shards or replay.fleet.num_shards,
        prices=last_prices(prices),
        table=None if limits_file is None else read_limits(limits_file, tenants),
        rate=rate,
        seed=seed,
    )
    num_requests = len(replay.requests) + len(replay.refused)
    display = RunDisplay(["whatif"])
    try:
        with display.shown():
            outcomes = predict(replay, change, lambda ended: display.update(0, "", ended / num_requests))
    except (PluginError, ValueError) as error:
        raise CommandError(f"--policy {change.policy}: {error}") from error
    was = by_tenant(recorded(replay), Prices(prices))
    will_be = by_tenant(outcomes, change.prices)
    if as_json:
        rows = [
            {"tenant": tenant, "recorded": _plain(was[tenant]), "predicted": _plain(will_be[tenant])} for tenant in was
        ]
        click.echo(json.dumps(rows))
    else:
        _print(was, will_be)


def _plain(figures: TenantFigures) -> dict[str, Any]:
    return {**msgspec.structs.asdict(figures), "bill": decimal(figures.cost_nanos)}


def _print(was: Mapping[str, TenantFigures], will_be: Mapping[str, TenantFigures]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("tenant", overflow="fold")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for tenant, before in was.items():
        if tenant == ALL and len(was) == 2:
            continue
        for label, figures in ((tenant or "-", before), ("  predicted", will_be[tenant])):
            table.add_row(label, *(cell(figures) for cell in _COLUMNS.values()))
    Console(highlight=False).print(table)
