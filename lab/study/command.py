"""`kvloom-lab bench routing`: the tables of docs/notes/routing/policy-comparison.md, from the traces."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from lab.flags import count, flag, flags
from lab.pages import PAGE, check_page, write_table
from lab.study.page import render
from lab.study.plan import CLASSES, Job, StudyPlan
from lab.study.results import StudyResults
from tools.failures import CommandError
from tools.simulate.parallel import perform_all
from tools.simulate.runs import (
    CapacityReport,
    CapacitySpec,
    ProgressCallback,
    RunReport,
    perform_capacity,
    perform_run,
)


def perform_job(job: Job, report_progress: ProgressCallback) -> RunReport | CapacityReport:
    if isinstance(job, CapacitySpec):
        return perform_capacity(job, report_progress)
    return perform_run(job, report_progress)


@click.command("routing")
@flags(
    "routing",
    flag("--mooncake", PAGE, None, "Mooncake's conversation trace.", required=True),
    flag("--weka", PAGE, None, "WEKA's sessions.", required=True),
    flag(
        "--results",
        click.Path(path_type=Path, file_okay=False),
        None,
        "Where finished simulations are kept: what is there already is not done again.",
        to="results_dir",
        required=True,
    ),
    flag("--page", PAGE, None, "Write the tables between its markers.  [default: print them]"),
    flag("--only", str, None, "These tables.  [default: all but classes]", metavar="NAME,..."),
    count("--jobs", None, "Processes.  [default: one per core]", most=1024),
)
def study_command(
    mooncake: Path, weka: Path, results_dir: Path, page: Path | None, only: str | None, jobs: int | None
) -> None:
    """Simulate all tables of docs/notes/routing: every policy on public traces, and the default one under stress."""
    plan = StudyPlan(str(mooncake), str(weka))
    names = _choose(plan, only)
    if page is not None:
        check_page(page, names)
    results = StudyResults(results_dir)
    num_processes = jobs or os.cpu_count() or 1
    capacity: float | None = None
    if "rates" in names:
        _perform([plan.capacity_job], results, num_processes)
        report = results.find_capacity(plan.capacity_job)
        assert report is not None
        capacity = report.capacity
    for name in names:
        table = plan.table(name, capacity)
        click.echo(f"{name}: {len(table.jobs())} simulations", err=True)
        _perform(table.jobs(), results, num_processes)
        markdown = render(table, results)
        if page is not None:
            write_table(page, name, markdown)
        else:
            click.echo(f"\n{name}\n\n{markdown}")


def _choose(plan: StudyPlan, only: str | None) -> list[str]:
    if only is None:
        return plan.names
    chosen = [part.strip() for part in only.split(",")]
    existing = [*plan.names, CLASSES]
    for name in chosen:
        if name not in existing:
            raise CommandError(f"--only {name}: no such table; there are {', '.join(existing)}")
    return chosen


def _perform(jobs: Sequence[Job], results: StudyResults, num_processes: int) -> None:
    missing = [job for job in jobs if not results.has(job)]
    perform_all(perform_job, missing, [_name(job) for job in missing], num_processes, results.keep)


def _name(job: Job) -> str:
    if isinstance(job, CapacitySpec):
        return f"{job.run.policy}, capacity"
    unknown = "" if job.has_classes else ", no classes"
    return f"{job.policy}{unknown}, load {job.load:.4g}, {job.num_shards} shards, seed {job.seed}"
