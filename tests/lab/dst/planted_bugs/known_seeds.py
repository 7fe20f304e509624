"""A seed that catches each planted bug, so that the suite need not search for it each time.

They are in `known_seeds.json`. A bug that is not there, or whose seed catches it no more since the scenarios have
changed, is searched for among all its seeds. `python -m tests.lab.dst.planted_bugs.known_seeds` writes the table
again: it tries the known seeds first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from lab.dst.run_seed import run_seed
from tests.lab.dst.planted_bugs import PLANTED_BUGS, PlantedBug

TABLE = Path(__file__).with_suffix(".json")


class KnownSeed(NamedTuple):
    seed: int
    num_events: int
    """After how many events of the routers the bug is caught: what it costs."""


def seed_that_catches(bug: PlantedBug, known: KnownSeed | None = None) -> KnownSeed | None:
    """A seed in whose run the bug, which must be planted, breaks its invariant. The known one is tried first, if it is
    one of the bug's seeds. None: none of these catches it. They are without limits, which not all checkers can be used
    with."""
    checkers = () if bug.checker is None else (bug.checker,)
    seeds = range(bug.first_seed, bug.first_seed + bug.max_seeds)
    for seed in sorted(seeds, key=lambda seed: (known is None or seed != known.seed, seed)):
        failure = run_seed(seed, checkers, with_limits=False).failure
        if failure is not None and failure.invariant == bug.invariant:
            return KnownSeed(seed, failure.num_events)
    return None


def cheapest_proofs(known: Mapping[str, KnownSeed]) -> set[str]:
    """The names of the planted bugs that are caught soonest: one for each checker, and for each invariant of the
    simulation itself."""
    cheapest: dict[str, PlantedBug] = {}
    for bug in sorted(PLANTED_BUGS, key=lambda bug: known[bug.name].num_events if bug.name in known else 1 << 62):
        cheapest.setdefault(bug.invariant, bug)
    return {bug.name for bug in cheapest.values()}


def read_known_seeds() -> dict[str, KnownSeed]:
    """By name of the bug."""
    return {name: KnownSeed(*known) for name, known in json.loads(TABLE.read_text()).items()}


def main() -> None:
    before, known = read_known_seeds(), dict[str, KnownSeed]()
    for bug in PLANTED_BUGS:
        with pytest.MonkeyPatch.context() as patch:
            bug.plant(patch)
            found = seed_that_catches(bug, before.get(bug.name))
        click.echo(f"{bug.name}: {'not caught' if found is None else found.seed}")
        if found is not None:
            known[bug.name] = found
    rows = (f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
