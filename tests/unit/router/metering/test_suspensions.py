"""A router believes clients outside the fabric about lost tokens only of requests during which it did not run."""

from __future__ import annotations

import msgspec
import pytest

from router.metering.suspensions import LEAST_SECONDS, Suspensions, is_believed
from tests.fakes.usage import NOON, usage_record


@pytest.mark.parametrize(
    ("seconds", "woke_at", "answer_id", "expected"),
    [
        (LEAST_SECONDS + 1.0, NOON - 0.5, "a", True),
        (LEAST_SECONDS + 1.0, NOON + 5.0, "a", True),  # the end of the request was processed first
        (LEAST_SECONDS + 1.0, NOON - 60.0, "a", False),  # it began later
        (LEAST_SECONDS, NOON - 0.5, "a", False),  # a busy machine
        (0.5, NOON - 0.5, "a", False),
        (0.5, NOON - 0.5, "", True),  # an edge
    ],
)
def test_only_what_a_hung_router_has_computed_is_credited(
    seconds: float, woke_at: float, answer_id: str, expected: bool
) -> None:
    """Otherwise a client could read an answer, and say that nothing had arrived."""
    suspensions = Suspensions(lambda: woke_at)
    suspensions.note(100.0, 100.0 + seconds)
    record = msgspec.json.encode(usage_record(1, "r", answer_id=answer_id))  # it ran for a second, until noon
    assert is_believed(record, suspensions) is expected
