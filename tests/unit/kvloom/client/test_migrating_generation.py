"""What the SDK tells another router about an answer whose router was lost."""

from __future__ import annotations

from kvloom.client.migrating_generation import MigratingGeneration
from kvloom.v1.generation_pb2 import FINISH_REASON_STOP, SequenceFinish
from kvloom.v1.router_service_pb2 import ChoiceDelta, GenerateRequest, GenerateResponse


def test_a_continuation_has_the_ticket_and_all_that_was_received() -> None:
    """Without them the client would pay once more, or the fabric would not be paid for the choices that have ended. A
    later response has no ticket, and the first one holds."""
    answer = MigratingGeneration(GenerateRequest(model="m", text="x", request_id="r", n=2))
    assert not answer.next_request().continuation_ticket
    start = ChoiceDelta(index=0, token_ids=[5], text="a")
    answer.apply(GenerateResponse(deltas=[start], continuation_ticket=b"ticket"))
    finish = SequenceFinish(reason=FINISH_REASON_STOP)
    answer.apply(GenerateResponse(deltas=[ChoiceDelta(index=1, token_ids=[6, 7], text="bc", finish=finish)]))
    later = answer.next_request()
    assert later.continuation_ticket == b"ticket"
    found = [(list(one.token_ids), one.num_delivered_chars, one.done) for one in later.partial_choices]
    assert found == [([5], 1, False), ([6, 7], 0, True)]
