"""When a model that is unloaded or put to sleep has nothing to do any more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tools.supervisor.models.idle_watch import IdleWatch, ShardWork

IDLE, BUSY = ShardWork(0, 7), ShardWork(1, 7)


def num_polls(*polls: Sequence[ShardWork | None]) -> int | None:
    """How many polls it takes; None: more than there are."""
    watch = IdleWatch()
    for number, works in enumerate(polls, 1):
        watch.take(works)
        if watch.is_over:
            return number
    return None


@pytest.mark.parametrize(
    ("polls", "expected"),
    [
        ([[IDLE, IDLE]] * 3, 3),
        ([[IDLE, BUSY]] + [[IDLE, IDLE]] * 3, 4),
        ([[IDLE], [BUSY], [IDLE], [IDLE], [IDLE]], 5),
        ([[IDLE, None]] * 5, None),
        ([[]] * 3, 3),
    ],
    ids=["idle", "one is busy", "busy again", "one does not answer", "no shard"],
)
def test_all_shards_must_be_idle_for_a_while(polls: list[list[ShardWork | None]], expected: int | None) -> None:
    """Routers may be about to send what waited there, and a shard that does not answer may have anything."""
    assert num_polls(*polls) == expected


def test_what_comes_and_goes_between_polls_is_noticed() -> None:
    """A long prompt is prefilled in chunks, between which nothing runs: its request must not lose its shard."""
    assert num_polls(*([ShardWork(0, number)] for number in range(10))) is None
