"""`make test` has a quarter of an hour on two slow cores. The durations are recorded ones: no clock is judged."""

from __future__ import annotations

import pytest

from tests.durations import BUDGET_SECONDS, recorded, seconds_by_folder

NOT_EVERYWHERE = ("tests/gpu/",)
"""Where the machine that records has no part in it."""


@pytest.mark.parametrize(("folder", "budget_seconds"), BUDGET_SECONDS.items())
def test_a_folder_keeps_its_budget(folder: str, budget_seconds: float) -> None:
    """Each change adds a little; without a budget the suite took 40 minutes."""
    assert seconds_by_folder(recorded())[folder] <= budget_seconds


def test_every_file_of_tests_is_recorded(request: pytest.FixtureRequest) -> None:
    """A file that is missing in the record would be outside of every budget: `make durations` records it."""
    collected = {item.nodeid.partition("::")[0] for item in request.session.items}
    assert not {file for file in collected - set(recorded()) if not file.startswith(NOT_EVERYWHERE)}
