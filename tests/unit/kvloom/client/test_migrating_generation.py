"""What the SDK tells another router about an answer whose router was lost."""

from __future__ import annotations

from kvloom.client.generation import DeltaBuffer
from kvloom.client.migrating_generation import MigratingGeneration
from kvloom.errors import KvloomError
from kvloom.router_link.tracked_request import TrackedRequest
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_ERROR,
    FINISH_REASON_STOP,
    SamplingParams,
    SequenceFinish,
    SequenceStart,
    StopConditions,
)
from kvloom.v1.router_service_pb2 import ChoiceDelta, GenerateRequest, GenerateResponse
from tests.fakes.link_requests import link_request


def test_a_continuation_has_the_ticket_and_all_that_was_received() -> None:
    """Without them the client would pay once more, or the fabric would not be paid for the choices that have ended. The
    start of another choice has no ticket, and the first one holds."""
    answer = MigratingGeneration(GenerateRequest(model="m", text="x", request_id="r", n=2))
    assert not answer.next_request().continuation_ticket
    start = SequenceStart(continuation_ticket=b"ticket")
    answer.apply(GenerateResponse(deltas=[ChoiceDelta(index=0, token_ids=[5], text="a", start=start)]))
    finish = SequenceFinish(reason=FINISH_REASON_STOP)
    answer.apply(GenerateResponse(deltas=[ChoiceDelta(index=1, token_ids=[6, 7], text="bc", finish=finish)]))
    later = answer.next_request()
    assert later.continuation_ticket == b"ticket"
    found = [(list(one.token_ids), one.num_delivered_chars, one.done) for one in later.partial_choices]
    assert found == [([5], 1, False), ([6, 7], 0, True)]


class _Owner:
    def on_lost(self, tracked: TrackedRequest) -> None:
        tracked.lost_at = 1.0

    def on_over(self, tracked: TrackedRequest) -> None:
        pass

    def now(self) -> float:
        return 1.0


def test_so_does_one_over_a_shared_stream() -> None:
    """Prompts of tokens are sent over one stream to each router."""
    request = link_request("r", "m", [1], "", SamplingParams(), StopConditions())
    tracked = TrackedRequest(1, request, DeltaBuffer(10), _Owner(), b"")
    tracked.on_submitted("link")
    tracked.on_start(0, SequenceStart(continuation_ticket=b"ticket"))
    tracked.on_tokens(0, "a", [5], ())
    lost = KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, "lost").to_proto()
    tracked.on_finish(0, SequenceFinish(reason=FINISH_REASON_ERROR, error=lost))
    later = tracked.next_request()
    assert (later.wanted.continuation_ticket, [list(one.token_ids) for one in later.partial_choices]) == (
        b"ticket",
        [[5]],
    )
