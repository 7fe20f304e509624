"""`kvloom-lab bench regions`: a day in several cells, with each rule for where requests go, and the loss of one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from lab.bench.autoscaling import SMALL_GPU
from lab.bench.experiment import Column, Report, TableOf, experiment, show_progress
from lab.bench.modelled import percentile
from lab.bench.region_model import (
    MAX_CELLS,
    Choose,
    RegionPlan,
    Regions,
    RegionTurn,
    by_cost,
    cell_names,
    in_turn,
    own_first,
    round_trips,
    without_cache,
)
from lab.flags import count, number

RULES: Final[Mapping[str, Choose]] = {
    "own cell only": own_first,
    "all in turn": in_turn,
    "distance and wait": without_cache,
    "kvloom": by_cost,
}


class RegionRow(msgspec.Struct, frozen=True, kw_only=True):
    rule: str
    is_lost: bool
    """One cell is lost for a while."""
    num_requests: int
    in_slo: float
    """The share of all requests whose first token came in time."""
    ttft_p50: float | None
    ttft_p99: float | None
    away: float
    """The share of requests that another cell than the own one has answered."""
    cached: float
    """The share of prompt tokens that were cached."""
    num_moved: int
    """Answers that went on in another cell."""
    pause_p50: float | None
    pause_most: float | None
    num_refused: int
    num_resident_away: int
    """Requests of resident conversations that another cell than theirs has computed."""


def run_rule(rule: str, plan: RegionPlan, ttft_seconds: float) -> RegionRow:
    regions = Regions(plan, RULES[rule])
    regions.run()
    return summarised(rule, plan, regions.turns, ttft_seconds)


def summarised(rule: str, plan: RegionPlan, turns: Sequence[RegionTurn], ttft_seconds: float) -> RegionRow:
    served = [turn for turn in turns if not turn.is_refused]
    ttfts = [turn.ttft_seconds for turn in served if turn.ttft_seconds is not None]
    moved = [turn for turn in served if turn.num_moves]
    pauses = [turn.pause_seconds for turn in moved if turn.pause_seconds is not None]
    away = [turn for turn in served if turn.cell != turn.origin]
    return RegionRow(
        rule=rule,
        is_lost=bool(plan.loss_seconds),
        num_requests=len(turns),
        in_slo=sum(ttft <= ttft_seconds for ttft in ttfts) / max(1, len(turns)),
        ttft_p50=percentile(ttfts, 0.5),
        ttft_p99=percentile(ttfts, 0.99),
        away=len(away) / max(1, len(served)),
        cached=sum(turn.num_cached_tokens for turn in served) / max(1, sum(turn.num_prompt_tokens for turn in served)),
        num_moved=len(moved),
        pause_p50=round(statistics.median(pauses), 3) if pauses else None,
        pause_most=round(max(pauses), 3) if pauses else None,
        num_refused=len(turns) - len(served),
        num_resident_away=sum(turn.is_resident for turn in away),
    )


_COLUMNS: Final[Sequence[Column]] = (
    Column("rule", "rule", is_left=True),
    Column("in SLO", "in_slo", ".2%"),
    Column("TTFT p50", "ttft_p50", ".2f"),
    Column("p99", "ttft_p99", ".2f"),
    Column("away", "away", ".1%"),
    Column("cached", "cached", ".1%"),
    Column("moved", "num_moved"),
    Column("pause p50", "pause_p50", ".2f"),
    Column("most", "pause_most", ".2f"),
    Column("refused", "num_refused"),
    Column("residents away", "num_resident_away"),
)


@experiment(
    "regions",
    count("--cells", 4, "How many cells there are.", least=2, most=MAX_CELLS, to="num_cells"),
    count("--shards", 4, "The shards of each cell.", to="num_shards"),
    number("--peak-rate", 1.0, "Conversations that begin per second in a cell at its busiest time.", above=True),
    number("--resident-share", 0.2, "The share of conversations that must stay in their cell.", most=1.0),
    number("--day-seconds", 3600.0, "How long a day's load takes.", above=True),
    number("--loss-seconds", 300.0, "How long the first cell is lost, from its busiest time on.", above=True),
    number("--ttft-seconds", 2.0, "The objective for first tokens.", above=True),
    count("--seed", 1, "Of the conversations.", least=0),
)
def bench_regions(ttft_seconds: float, loss_seconds: float, **settings: Any) -> Report:
    """Play a day's conversations in several cells around the world, each with modelled shards behind the real router
    core, and with each rule for the cell that a request goes to: the own one, all in turn, by distance and wait, and as
    kvloom's edges decide. Then play it again with the loss of a cell at its busiest time. Ways are computed from the
    distances."""
    plan = RegionPlan(profile=SMALL_GPU, loss_seconds=0.0, **settings)
    parts: list[TableOf | str] = []
    rows: list[RegionRow] = []
    for one in (plan, msgspec.structs.replace(plan, loss_seconds=loss_seconds)):
        of_plan = []
        for rule in RULES:
            of_plan.append(run_rule(rule, one, ttft_seconds))
            show_progress(f"{rule}{', a cell lost' if one.loss_seconds else ''}: {of_plan[-1].in_slo:.2%} in SLO")
        rows += of_plan
        names = cell_names(plan.num_cells)
        lost = f", {names[0]} lost for {loss_seconds:g} s" if one.loss_seconds else ""
        longest = max(map(max, round_trips(plan.num_cells)))
        title = (
            f"{plan.num_cells} cells up to {longest * 1e3:.0f} ms apart, {plan.num_shards} shards of {SMALL_GPU.name} "
            f"each, {of_plan[0].num_requests:,} requests{lost}, SLO {ttft_seconds:g} s to the first token"
        )
        parts.append(TableOf(_COLUMNS, of_plan, title))
    return Report(rows, parts, is_right=not any(row.num_resident_away for row in rows))
