"""The rows of the printed table: simulations in parallel processes, and their figures, combined over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tools.simulate.calibration import Calibration, combine_calibrations
from tools.simulate.parallel import perform_all
from tools.simulate.runs import POOL, CapacitySpec, RunReport, RunSpec, perform_capacity, perform_run
from tools.simulate.statistics import Statistics, combine


def measure_runs(
    run: RunSpec, policies: Sequence[str], seeds: Sequence[int], num_processes: int
) -> tuple[list[dict[str, Any]], dict[str, RunReport]]:
    specs = [msgspec.structs.replace(run, policy=policy, seed=seed) for policy in policies for seed in seeds]
    names = [spec.policy if len(seeds) == 1 else f"{spec.policy}, seed {spec.seed}" for spec in specs]
    reports = perform_all(perform_run, specs, names, num_processes)
    by_policy = {policy: reports[i * len(seeds) : (i + 1) * len(seeds)] for i, policy in enumerate(policies)}
    rows = [_combine_reports(policy, found) for policy, found in by_policy.items()]
    return rows, {policy: found[0] for policy, found in by_policy.items()}


def add_distances(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to each row the mean TTFT as a multiple of the pool's; None if there is no pool."""
    pool = next((row["ttft_mean"] for row in rows if row["policy"] == POOL), None)
    for row in rows:
        row["ttft_of_pool"] = row["ttft_mean"] / pool if pool and row["ttft_mean"] is not None else None


def measure_capacities(
    run: RunSpec, policies: Sequence[str], seeds: Sequence[int], num_processes: int
) -> tuple[list[dict[str, Any]], dict[str, RunReport]]:
    specs = [CapacitySpec(run=msgspec.structs.replace(run, policy=policy), seeds=tuple(seeds)) for policy in policies]
    reports = perform_all(perform_capacity, specs, policies, num_processes)
    rows: list[dict[str, Any]] = []
    for policy, report in zip(policies, reports, strict=True):
        row = _combine_reports(policy, report.runs)
        unit = "users" if run.trace.format == "weka" else "rate"
        rows.append({**row, "capacity": report.capacity, "load_unit": unit})
    return rows, {policy: report.runs[0] for policy, report in zip(policies, reports, strict=True)}


def _combine_reports(policy: str, reports: Sequence[RunReport]) -> dict[str, Any]:
    """A row, in its `models` one for each model if there are several, in its `classes` one for each class, and in its
    `calibration` how well predictions came true."""
    row = combine(policy, [report.statistics for report in reports])
    row["calibration"] = combine_calibrations([report.calibration for report in reports])
    names = reports[0].models
    by_model = {name: combine(policy, [report.models[name] for report in reports]) for name in names}
    if by_model:
        row["models"] = by_model
    if reports[0].classes:
        row["classes"] = {
            name: combine(policy, [report.classes[name] for report in reports]) for name in reports[0].classes
        }
    return row


def recorded_row(
    name: str, recorded: Statistics, calibration: Mapping[str, Calibration], *, with_capacity: bool
) -> dict[str, Any]:
    """A row for the recorded run, to be shown with the simulated ones. Figures that were not recorded are None."""
    row = {**combine(name, [recorded]), "router_microseconds": None, "in_force": False}
    row["calibration"] = combine_calibrations([calibration])
    return {**row, "capacity": None, "load_unit": "rate"} if with_capacity else row
