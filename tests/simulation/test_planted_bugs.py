"""Bugs planted in the core, each of which its own checker must catch alone."""

from __future__ import annotations

import pytest

from tests.simulation.planted_bugs import PLANTED_BUGS, PlantedBug
from tools.dst.checkers import CHECKERS
from tools.dst.run_seed import run_seed


def seeds_to_catch(bug: PlantedBug) -> int | None:
    """The number of seeds that it takes, from its first one on; None: more than it may take. They are without limits,
    which not all checkers can be used with."""
    checkers = () if bug.checker is None else (bug.checker,)
    for seed in range(bug.max_seeds):
        failure = run_seed(bug.first_seed + seed, checkers, with_limits=False).failure
        if failure is not None and failure.invariant == bug.invariant:
            return seed + 1
    return None


@pytest.mark.parametrize("bug", PLANTED_BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_caught(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checker that catches nothing would not be missed when it breaks."""
    bug.plant(monkeypatch)
    assert seeds_to_catch(bug) is not None, bug.story


def test_every_checker_has_a_planted_bug() -> None:
    """A new checker comes with a proof that it works."""
    assert {bug.checker for bug in PLANTED_BUGS} >= set(CHECKERS)
