"""The queues of requests that wait in the router, by themselves."""

from __future__ import annotations

import pytest

from router.core.dispatch.waiting_queues import WaitingQueues
from router.core.events import ChoiceSpec, Request
from router.core.live import LiveRequest, QueueId, StreamClient

QUEUE = QueueId("m")


def waiting(tenant: str, number: int) -> LiveRequest:
    choices = [ChoiceSpec(slot=number, index=0)]
    return LiveRequest(Request(f"{tenant}-{number}", "c", "m", [1], "", choices, tenant=tenant), StreamClient("c"), 0.0)


@pytest.fixture
def queues() -> WaitingQueues:
    """Hundreds of requests of one tenant wait before one of another."""
    made = WaitingQueues()
    for number in range(300):
        made.push(waiting("big", number), QUEUE)
    made.push(waiting("small", 300), QUEUE)
    return made


def test_a_tenant_without_a_turn_is_asked_once(queues: WaitingQueues) -> None:
    """Every event of the fleet asks for the next request. To look at each that waits would stop the router."""
    asked: list[LiveRequest] = []

    def has_turn(live: LiveRequest) -> bool:
        asked.append(live)
        return live.request.tenant == "small"

    taken = queues.take(QUEUE, lambda _: True, has_turn=has_turn)
    assert taken is not None
    assert taken.request.tenant == "small"
    assert len(asked) == 2


def test_a_request_that_fits_nowhere_does_not_hold_up_its_tenant(queues: WaitingQueues) -> None:
    """The requests behind it may fit where there is room."""
    taken = queues.take(QUEUE, lambda live: live.request.request_id == "big-7", has_turn=lambda _: True)
    assert taken is not None
    assert taken.request.request_id == "big-7"
    assert len(queues) == 300
