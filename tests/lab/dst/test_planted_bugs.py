"""Bugs planted in the core, each of which its own checker must catch alone.

`make test` plants the one of each checker that is caught soonest; `make test-long` plants the others."""

from __future__ import annotations

import pytest

from lab.dst.checkers import CHECKERS
from tests.lab.dst.planted_bugs import PLANTED_BUGS, PlantedBug
from tests.lab.dst.planted_bugs.known_seeds import cheapest_proofs, read_known_seeds, seed_that_catches

KNOWN_SEEDS = read_known_seeds()
CHEAPEST = cheapest_proofs(KNOWN_SEEDS)


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, id=bug.name, marks=() if bug.name in CHEAPEST else pytest.mark.long) for bug in PLANTED_BUGS],
)
def test_planted_bug_is_caught(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that catches nothing would not be missed when it breaks."""
    if bug.is_rare and bug.name not in KNOWN_SEEDS:
        pytest.skip("no seed is known that catches it: it takes thousands, and its unit tests are elsewhere")
    bug.plant(monkeypatch)
    assert seed_that_catches(bug, KNOWN_SEEDS.get(bug.name)) is not None, bug.story


def test_every_checker_has_a_planted_bug() -> None:
    """A new checker comes with a proof that it works, which `make test` runs."""
    assert {bug.checker for bug in PLANTED_BUGS if bug.name in CHEAPEST and not bug.is_rare} >= set(CHECKERS)


def test_the_known_seeds_are_of_bugs_that_exist() -> None:
    """A bug that was renamed would be searched for in every run, and its old name would stay."""
    names = {bug.name for bug in PLANTED_BUGS}
    assert names - {bug.name for bug in PLANTED_BUGS if bug.is_rare} <= KNOWN_SEEDS.keys() <= names
