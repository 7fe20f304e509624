"""Tenants that wait are served alike, counted in tokens, whatever they ask for."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.core.dispatch.service_counters import ServiceCounters, VirtualCounters
from router.core.dispatch.waiting_queues import WaitingQueues
from router.core.events import ChoiceSpec, Request
from router.core.live import LiveRequest, QueueId, StreamClient
from router.core.priority_classes import PriorityClass
from tests.examples import num_examples

QUEUE = QueueId("m")
MAX_PROMPT, MAX_OUTPUT, BATCH = 8, 6, 3
BOUND = MAX_PROMPT + 2 * MAX_OUTPUT * BATCH
"""The most by which the counters of tenants that wait may differ: what one of them can be served once it was picked."""


@dataclasses.dataclass(frozen=True)
class Ask:
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int


class Server:
    """Requests wait in one queue, a few run at a time, and each of these gets a token in every step."""

    def __init__(self) -> None:
        self.counters = ServiceCounters()
        self.queues = WaitingQueues(self.counters)
        self.served: Counter[str] = Counter()
        self._running: list[LiveRequest] = []
        self._num_asked = 0

    def ask(self, ask: Ask, priority_class: PriorityClass | None = None) -> None:
        self._num_asked += 1
        request = Request(
            f"r{self._num_asked}",
            "c",
            "m",
            [1] * ask.num_prompt_tokens,
            "",
            [ChoiceSpec(1, 0)],
            max_tokens=ask.num_output_tokens,
            tenant=ask.tenant,
            priority_class=priority_class,
        )
        self.queues.push(LiveRequest(request, StreamClient("c"), 0.0), QUEUE)

    def step(self) -> None:
        while len(self._running) < BATCH and (live := self.queues.take(QUEUE, lambda _: True)) is not None:
            self.counters.note_dispatch(live, len(live.request.prompt_token_ids))
            self.served[live.request.tenant] += len(live.request.prompt_token_ids)
            self._running.append(live)
        for live in list(self._running):
            live.choices[0].output_token_ids.append(7)
            self.counters.settle(live.choices[0])
            self.served[live.request.tenant] += 2
            if len(live.choices[0].output_token_ids) == live.request.max_tokens:
                self._running.remove(live)

    def waiting(self) -> set[str]:
        return {live.request.tenant for live in self.queues}


ASKS = st.builds(Ask, st.sampled_from("abcd"), st.integers(1, MAX_PROMPT), st.integers(1, MAX_OUTPUT))


@settings(max_examples=num_examples(60))
@given(rounds=st.lists(st.lists(ASKS, max_size=6), max_size=40))
def test_service_of_tenants_that_wait_differs_by_a_bound(rounds: Sequence[Sequence[Ask]]) -> None:
    """Theorem 4.4 of "Fairness in Serving Large Language Models": the bound does not grow with time."""
    server = Server()
    for tenant in "abcd":  # counting begins with the second tenant
        server.ask(Ask(tenant, 1, 1))
    begun: dict[tuple[str, str], int] = {}
    for asks in rounds:
        for ask in asks:
            server.ask(ask)
        server.step()
        waiting = server.waiting()
        counters = [server.counters.service("m", "interactive", tenant) for tenant in waiting]
        assert max(counters, default=0) - min(counters, default=0) <= BOUND
        for one, other in itertools.combinations("abcd", 2):
            if not {one, other} <= waiting:
                begun.pop((one, other), None)
                continue
            ahead = server.served[one] - server.served[other]
            assert abs(ahead - begun.setdefault((one, other), ahead)) <= 2 * BOUND


@settings(max_examples=num_examples(25))
@given(weight=st.sampled_from([1, 2, 4]), asks=st.lists(st.integers(1, MAX_OUTPUT), min_size=60, max_size=60))
def test_classes_of_one_rank_share_by_weight(weight: int, asks: Sequence[int]) -> None:
    """A weight is a promise of a share, whatever the lengths of answers."""
    server = Server()
    heavy, light = PriorityClass("heavy", 1, weight=weight), PriorityClass("light", 1)
    for number in asks:
        server.ask(Ask("a", 1, number), heavy)
        server.ask(Ask("b", 1, number), light)
    while server.waiting() == {"a", "b"}:
        server.step()
    assert abs(server.served["a"] / weight - server.served["b"]) <= 2 * BOUND


def test_idling_earns_no_credit() -> None:
    """Otherwise a tenant that comes in the evening would have the fleet to itself until it had caught up."""
    counters = VirtualCounters(8)
    counters.enter("busy")
    counters.charge("busy", 1000)
    counters.enter("late")
    assert counters["late"] == 1000
    counters.charge("late", 50)
    assert min("busy", "late", key=counters.order) == "busy"


def test_if_none_waits_a_tenant_starts_where_the_last_one_is() -> None:
    """A lone tenant that never had to wait must not be punished for what it was served when it was alone."""
    counters = VirtualCounters(8)
    counters.dispatch("alone")
    counters.charge("alone", 1000)
    counters.enter("late")
    counters.enter("alone")
    assert counters["late"] == counters["alone"] == 1000


@settings(max_examples=num_examples(40))
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=200))
@example([(0, 0), *((number, 1) for number in range(2, 9)), (0, 1), (1, 0)])
def test_memory_is_bounded_and_no_waiting_name_is_forgotten(steps: Sequence[tuple[int, int]]) -> None:
    """Names come from callers: a million of them must not stay, and none may lose its place."""
    counters = VirtualCounters(8)
    waiting: Counter[str] = Counter()
    for number, kind in steps:
        name = str(number)
        if kind == 0:
            before = counters[name]
            counters.enter(name)
            waiting[name] += 1
            assert counters[name] >= before
        elif kind == 1 and waiting[name]:
            counters.leave(name)
            waiting[name] -= 1
        else:
            counters.dispatch(name)
            counters.charge(name, number)
        num_waiting = sum(count > 0 for count in waiting.values())
        assert all(name in counters for name, count in waiting.items() if count)
        assert len(counters) <= 8 + num_waiting + 1


def test_sub_flows_share_what_their_tenant_gets() -> None:
    """A tenant that names a hundred sub-flows must get no more than one that names none."""
    queues = WaitingQueues()
    for number in range(40):
        for tenant, fairness_id in (("many", f"flow-{number}"), ("one", "")):
            request = Request(f"{tenant}{number}", "c", "m", [1] * 4, "", (), tenant=tenant, fairness_id=fairness_id)
            queues.push(LiveRequest(request, StreamClient("c"), 0.0), QUEUE)
    taken: Counter[str] = Counter()
    for _ in range(40):
        live = queues.take(QUEUE, lambda _: True)
        assert live is not None
        queues.service.note_dispatch(live, 4)
        taken[live.request.tenant] += 1
    assert taken == {"many": 20, "one": 20}
