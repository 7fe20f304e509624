"""The search for the highest load, on curves whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tools.failures import CommandError
from tools.simulate.capacity import find_capacity


def sharp(limit: float, asked: list[float] | None = None) -> Callable[[float], float]:
    def goodput_at(load: float) -> float:
        if asked is not None:
            asked.append(load)
        return 1.0 if load <= limit else 0.0

    return goodput_at


@pytest.mark.parametrize("limit", [0.013, 0.7, 1.0, 3.25, 777.0])
def test_the_highest_rate_is_found_to_two_percent(limit: float):
    """The start of the search does not matter."""
    for start in (0.5, 1.0, 40.0):
        assert limit / 1.02 <= find_capacity(sharp(limit), start) <= limit


def test_smooth_curves_too():
    """Real goodput falls gradually."""
    found = find_capacity(lambda load: math.exp(-load / 100), 1.0)
    assert found == pytest.approx(-100 * math.log(0.9), rel=0.02)


@pytest.mark.parametrize("limit", [1, 2, 7, 99, 110, 1000])
def test_users_are_whole_numbers(limit: int):
    """Users are whole numbers, and small ones are found exactly."""
    asked: list[float] = []
    found = find_capacity(sharp(limit, asked), 80, whole_numbers=True)
    assert found == limit if limit < 50 else limit / 1.02 <= found <= limit
    assert all(load == int(load) for load in asked)


def test_no_load_is_simulated_twice():
    """Each load takes minutes to simulate."""
    asked: list[float] = []
    find_capacity(sharp(37, asked), 80, whole_numbers=True)
    assert len(asked) == len(set(asked)) < 12


def test_a_search_without_a_result_ends():
    """A trace that is too short for any load, and a limit that nothing meets."""
    with pytest.raises(CommandError, match="too short"):
        find_capacity(lambda _: 1.0, 1.0)
    with pytest.raises(CommandError, match="stays below 90%"):
        find_capacity(lambda _: 0.0, 1.0)
    with pytest.raises(CommandError, match="stays below 90%"):
        find_capacity(lambda _: 0.0, 5, whole_numbers=True)
