"""What `kvloom-lab bench spot-notice` and `kvloom-lab bench preemption` count in streams."""

from __future__ import annotations

import pytest

from lab.bench.disturbed import num_differing_bytes
from tools.bench.streams import MeasuredStream


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [("", "", 0), ("same", "same", 0), ("same", "sane", 1), ("long", "longer", 2), ("é", "e", 2)],
)
def test_every_byte_that_differs_counts(one: str, other: str, count: int) -> None:
    """An answer that was cut short must not pass for the same one."""
    assert num_differing_bytes(one, other) == count


def test_the_longest_pause_is_between_two_pieces() -> None:
    """The time to the first token is no pause."""
    assert MeasuredStream("a", max_tokens=5, pieces_at=[3.0, 3.5, 5.0, 5.25]).longest_pause_seconds == 1.5
    assert MeasuredStream("b", 5).longest_pause_seconds == 0.0
