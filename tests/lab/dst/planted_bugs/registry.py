"""How a planted bug is described."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from lab.dst.checker import Checker

Patch = pytest.MonkeyPatch


@dataclasses.dataclass(frozen=True, slots=True)
class PlantedBug:
    plant: Callable[[Patch], None]
    checker: type[Checker] | None
    """Which must catch it, alone; None: the simulation itself."""
    invariant: str
    max_seeds: int
    """Within which it must be caught."""
    first_seed: int = 0
    """For rare bugs: near a seed that finds it."""
    is_rare: bool = False
    """Whether it takes so many seeds to catch it that the suite does not search for it. It is tested as long as the
    table of known seeds has one."""

    @property
    def name(self) -> str:
        return self.plant.__name__

    @property
    def story(self) -> str:
        return " ".join((self.plant.__doc__ or "").split())


PLANTED_BUGS: list[PlantedBug] = []


def caught_by(
    checker: type[Checker] | None,
    invariant: str = "",
    max_seeds: int = 60,
    first_seed: int = 0,
    *,
    is_rare: bool = False,
) -> Callable[[Callable[[Patch], None]], Any]:
    """Register a planted bug. Without a checker the simulation itself must break the invariant."""

    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        name = invariant if checker is None else checker.invariant
        PLANTED_BUGS.append(PlantedBug(plant, checker, name, max_seeds, first_seed, is_rare))
        return plant

    return register
