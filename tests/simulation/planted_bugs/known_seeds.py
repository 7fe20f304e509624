"""A seed that catches each planted bug, so that the suite need not search for it each time.

They are in `known_seeds.json`. A bug that is not there, or whose seed catches it no more since the scenarios have
changed, is searched for among all its seeds. `python -m tests.simulation.planted_bugs.known_seeds` writes the
table anew."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from tests.simulation.planted_bugs import PLANTED_BUGS, PlantedBug
from tools.dst.run_seed import run_seed

TABLE = Path(__file__).with_suffix(".json")


def seed_that_catches(bug: PlantedBug, known_seed: int | None = None) -> int | None:
    """A seed in whose run the bug, which must be planted, breaks its invariant. The known one is tried first, if it is
    one of the bug's seeds. None: none of these catches it. They are without limits, which not all checkers can be used
    with."""
    checkers = () if bug.checker is None else (bug.checker,)
    seeds = range(bug.first_seed, bug.first_seed + bug.max_seeds)
    for seed in sorted(seeds, key=lambda seed: (seed != known_seed, seed)):
        failure = run_seed(seed, checkers, with_limits=False).failure
        if failure is not None and failure.invariant == bug.invariant:
            return seed
    return None


def read_known_seeds() -> dict[str, int]:
    """Name of a bug → seed."""
    return json.loads(TABLE.read_text())


def main() -> None:
    known: dict[str, int] = {}
    for bug in PLANTED_BUGS:
        with pytest.MonkeyPatch.context() as patch:
            bug.plant(patch)
            seed = seed_that_catches(bug)
        click.echo(f"{bug.name}: {'not caught' if seed is None else seed}")
        if seed is not None:
            known[bug.name] = seed
    TABLE.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
