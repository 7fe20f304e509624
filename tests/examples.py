"""How many examples a property gets."""

from __future__ import annotations

from hypothesis import settings


def num_examples(number: int) -> int:
    """`number`, scaled as the profile of the run (tests/conftest.py) scales hypothesis' own 100: `make test` tries a
    part of them, and `make test-long` several times as many."""
    return number * settings().max_examples // 100
