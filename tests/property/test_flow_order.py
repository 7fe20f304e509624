"""The next flow is the one that a search through all of them would find, whatever has come, gone, aged and been served
since the order was last looked at."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.core.dispatch.counter_order import CounterOrder
from router.core.dispatch.service_counters import Flow, ServiceCounters
from router.core.dispatch.waiting_queues import WaitingQueues
from router.core.events import ChoiceSpec, Request
from router.core.live import LiveRequest, QueueId, StreamClient
from router.core.priority_classes import BATCH, INTERACTIVE, PriorityClass
from tests.examples import num_examples

QUEUE = QueueId("m")
CLASSES = (
    INTERACTIVE,
    BATCH,
    PriorityClass("premium", 0, weight=2.0, aging_seconds=8.0),
    PriorityClass("also", 1, aging_seconds=4.0),
    PriorityClass("slow", 3, aging_seconds=2.0),
)


class Waiting(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.service = ServiceCounters()
        self.queues = WaitingQueues(self.service)
        self.now = 0.0
        self.num_requests = 0

    @rule(
        tenant=st.sampled_from("abcde"),
        fairness_id=st.sampled_from(["", "", "x", "y"]),
        priority_class=st.sampled_from(CLASSES),
        has_begun=st.booleans(),
    )
    def push(self, tenant: str, fairness_id: str, priority_class: PriorityClass, has_begun: bool) -> None:
        self.num_requests += 1
        request = Request(
            f"r{self.num_requests}",
            "c",
            "m",
            [1],
            "",
            [ChoiceSpec(1, 0)],
            tenant=tenant,
            fairness_id=fairness_id,
            priority_class=priority_class,
        )
        live = LiveRequest(request, StreamClient("c"), self.now)
        live.num_attempts = int(has_begun and self.num_requests % 4 == 0)
        self.queues.push(live, QUEUE)

    @precondition(lambda self: len(self.queues) > 0)
    @rule(number=st.integers(0, 50))
    def remove(self, number: int) -> None:
        waiting = list(self.queues)
        self.queues.remove(waiting[number % len(waiting)])

    @precondition(lambda self: len(self.queues) > 0)
    @rule(number=st.integers(0, 50), num_tokens=st.integers(0, 20))
    def serve_one_that_waits(self, number: int, num_tokens: int) -> None:
        """As another router's queue or shard of the same model would."""
        waiting = list(self.queues)
        self.service.note_dispatch(waiting[number % len(waiting)], num_tokens)

    @rule(num_tokens=st.integers(0, 20))
    def take(self, num_tokens: int) -> None:
        expected = self.keys()
        taken = self.queues.take(QUEUE, lambda _: True, now=self.now)
        assert (taken is None) == (not expected)
        if taken is not None:
            request = taken.request
            flow = Flow(taken.priority_class.name, request.tenant, request.fairness_id)
            assert expected[flow] == min(expected.values())
            self.service.note_dispatch(taken, num_tokens)

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def finds_all_in_order(self) -> None:
        expected = self.keys()
        found = [next(iter(requests.values())) for requests in self.queues._in_order(QUEUE, self.now)]
        flows = [Flow(live.priority_class.name, live.request.tenant, live.request.fairness_id) for live in found]
        assert sorted(flows) == sorted(expected)
        keys = [expected[flow] for flow in flows]
        assert keys == sorted(keys)

    def keys(self) -> dict[Flow, Any]:
        """What each flow is ordered by, computed anew."""
        heads: dict[Flow, LiveRequest] = {}
        for live in self.queues.queue(QUEUE):
            heads.setdefault(Flow(live.priority_class.name, live.request.tenant, live.request.fairness_id), live)
        most_urgent = min((head.priority_class.rank for head in heads.values()), default=0)
        keys: dict[Flow, Any] = {}
        for flow, head in heads.items():
            names = ("m", *flow)
            service = [self.service.order(names[:level], names[level]) for level in (1, 2, 3)]
            keys[flow] = max(most_urgent, head.rank(self.now)), service
        return keys


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=num_examples(60), stateful_step_count=40, deadline=None)


def test_equal_names_keep_the_order_in_which_they_came() -> None:
    """Tenants that have had the same are served first come, first served."""
    turns = CounterOrder[str](lambda _: 0)
    for name in "cab":
        turns.add(name)
    turns.discard("c")
    turns.add("c")
    assert list(turns.in_order()) == ["a", "b", "c"]


def test_names_that_left_do_not_stay_in_memory() -> None:
    """A million callers may each wait once and give up."""
    turns = CounterOrder[int](lambda _: 0)
    turns.add(-1)
    for name in range(10_000):
        turns.add(name)
        turns.discard(name)
    assert len(turns._heap) < 50
