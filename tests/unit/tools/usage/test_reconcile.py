"""What was metered against what was delivered."""

from __future__ import annotations

from kvloom.v1.usage_service_pb2 import MeteredAnswer
from tools.usage.reconcile import WitnessedAnswer, reconcile


def metered(request_id: str, num_output_tokens: int) -> MeteredAnswer:
    return MeteredAnswer(request_id=request_id, num_output_tokens=num_output_tokens)


def test_equal_counts_are_no_difference() -> None:
    """The ordinary case, with an answer to two prompts, whose requests are metered one by one."""
    found = reconcile(
        [metered("a", 5), metered("b.0", 2), metered("b.1", 3), metered("direct", 9)],
        [WitnessedAnswer("a", 5), WitnessedAnswer("b", 5), WitnessedAnswer("refused", 0, is_complete=False)],
    )
    assert found.is_exact
    assert (found.num_exact, found.num_without_witness, found.num_metered_tokens) == (2, 1, 10)


def test_every_token_too_many_or_too_few_is_found() -> None:
    """A comparison that overlooks one would prove nothing."""
    found = reconcile([metered("a", 6), metered("b", 4)], [WitnessedAnswer(name, 5) for name in "abc"])
    assert not found.is_exact
    assert (found.num_over, found.num_under, len(found.differences)) == (1, 2, 3)


def test_tokens_on_their_way_to_a_client_that_left_are_no_difference() -> None:
    """A router cannot know that the client has just gone; but it may never have metered fewer than arrived."""
    broken_off = WitnessedAnswer("a", 5, is_complete=False)
    assert reconcile([metered("a", 7)], [broken_off]).num_in_flight_tokens == 2
    assert not reconcile([metered("a", 4)], [broken_off]).is_exact


def test_an_answer_that_moved_to_another_edge_counts_with_its_last_witness() -> None:
    """The first edge had only a part of it."""
    lines = [WitnessedAnswer("a", 3, is_complete=False), WitnessedAnswer("a", 8)]
    assert reconcile([metered("a", 8)], lines).num_exact == 1
    assert reconcile([metered("a", 8)], lines[::-1]).num_exact == 1
