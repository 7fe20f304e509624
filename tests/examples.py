"""How many examples a property gets, and how many positions a search."""

from __future__ import annotations

import pytest
from hypothesis import settings

SOME_OR_ALL = [pytest.param(5, id="some"), pytest.param(1, marks=pytest.mark.long, id="all")]
"""For `parametrize("stride", SOME_OR_ALL)` of a search: `make test` tries a fifth of the positions, `make test-long`
all."""


def num_examples(number: int) -> int:
    """`number`, scaled as the profile of the run (tests/conftest.py) scales hypothesis' own 100: `make test` tries a
    part of them, and `make test-long` several times as many."""
    return number * settings().max_examples // 100
