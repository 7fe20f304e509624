"""Runs many seeds in parallel processes and sums up their results."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lab.dst.run_seed import Failure, SeedResult, run_seed

SEEDS_PER_TASK = 8
MAX_FAILURES = 20
"""After so many, no more seeds are started: they probably share one cause."""


@dataclasses.dataclass(slots=True)
class Summary:
    num_seeds: int = 0
    num_events: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    virtual_seconds: float = 0.0
    cpu_seconds: float = 0.0
    faults: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[Failure] = dataclasses.field(default_factory=list)

    def add(self, result: SeedResult) -> None:
        self.num_seeds += 1
        self.num_events += result.num_events
        self.num_requests += result.num_requests
        self.num_tokens += result.num_tokens
        self.virtual_seconds += result.virtual_seconds
        self.cpu_seconds += result.cpu_seconds
        self.faults.update(result.faults)
        if result.failure is not None:
            self.failures.append(result.failure)

    def to_json(self) -> dict[str, Any]:
        """Counts, and every failure with the command that replays it."""
        return {
            "seeds": self.num_seeds,
            "events": self.num_events,
            "requests": self.num_requests,
            "tokens": self.num_tokens,
            "virtual_seconds": round(self.virtual_seconds, 1),
            "cpu_seconds": round(self.cpu_seconds, 1),
            "faults": dict(sorted(self.faults.items())),
            "failures": [
                {
                    "seed": failure.seed,
                    "event": failure.num_events,
                    "at_seconds": round(failure.at_seconds, 6),
                    "invariant": failure.invariant,
                    "detail": failure.detail,
                    "replay": failure.replay,
                }
                for failure in sorted(self.failures, key=lambda failure: failure.seed)
            ],
        }


def run_campaign(
    seeds: Sequence[int],
    num_jobs: int,
    note: Callable[[SeedResult], None] = lambda _result: None,
    *,
    with_limits: bool = False,
) -> Summary:
    """Run every seed. `note` is called with each result, in the order of completion. A single job runs in this
    process."""
    summary = Summary()
    for result in _results(seeds, num_jobs, with_limits):
        summary.add(result)
        note(result)
        if len(summary.failures) >= MAX_FAILURES:
            break
    return summary


def _results(seeds: Sequence[int], num_jobs: int, with_limits: bool) -> Iterator[SeedResult]:
    if num_jobs == 1 or len(seeds) == 1:
        yield from (run_seed(seed, with_limits=with_limits or None) for seed in seeds)
        return
    tasks = [seeds[i : i + SEEDS_PER_TASK] for i in range(0, len(seeds), SEEDS_PER_TASK)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_jobs, mp_context=context) as pool:
        futures = [pool.submit(_run_task, task, with_limits) for task in tasks]
        try:
            for future in concurrent.futures.as_completed(futures):
                yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _run_task(seeds: Sequence[int], with_limits: bool) -> list[SeedResult]:
    return [run_seed(seed, with_limits=with_limits or None) for seed in seeds]
