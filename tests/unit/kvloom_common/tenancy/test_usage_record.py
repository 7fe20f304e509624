"""Which usage records are of one answer, and which of them counts."""

from __future__ import annotations

import msgspec

from kvloom_common.tenancy.usage_record import OUTCOME_LOST, counting
from tests.fakes.usage import usage_record


def test_the_requests_of_clients_outside_the_fabric_are_answers_of_their_own() -> None:
    """Such a client chooses its ids itself, and used one for twelve answers."""
    assert usage_record(1, "a", answer_id="x").answer != usage_record(2, "a", answer_id="y").answer
    assert usage_record(1, "a").answer == usage_record(1, "a", "r1/1").answer


def test_a_continuation_for_which_nothing_is_computed_adds_nothing() -> None:
    """A client without budget claimed output, and was charged for it beyond its hard budget. (`kvloom-lab chaos` found
    it.) After the death of a router it is the only one that knows what had been delivered."""
    begun = usage_record(1, "a", "r0/1", answer_id="x", num_attempts=1, num_output_tokens=20)
    ended = usage_record(1, "a", "r1/1", answer_id="x", num_resumed_tokens=500, num_output_tokens=500)
    assert counting([begun, ended]) == counting([ended, begun]) == [begun]
    lost = msgspec.structs.replace(begun, outcome=OUTCOME_LOST)
    assert counting([lost, ended]) == [ended]
    assert counting([ended]) == [ended]


def test_the_last_router_of_an_answer_knows_what_was_delivered() -> None:
    """A router meters what it hands to a connection; what was lost with it is delivered, and metered, by the next."""
    hung = usage_record(1, "a", "r0/1", num_output_tokens=10)
    stopped_early = usage_record(1, "a", "r1/1", num_output_tokens=8, num_resumed_tokens=7)
    assert counting([hung, stopped_early]) == counting([stopped_early, hung]) == [stopped_early]
