"""Declared classes: who goes first, what each is left, and who gives way, as the core decides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from router.core.actions import Action, RequestEnded, SequencesPreempted, SubmitAttempt
from router.core.dispatch.fair_shares import MAX_MOVES
from router.core.events import LoadReported, ShardLoad, Tick
from router.core.frames import Finish
from router.core.priority_classes import PriorityClass
from router.core.rule_settings import FairnessSettings
from tests.fakes.core_rig import CoreRig, has, only, submitted

GOLD = PriorityClass("gold", 0, aging_seconds=5.0)
PLAIN = PriorityClass("plain", 1, aging_seconds=5.0)
FLEX = PriorityClass("flex", 2, aging_seconds=5.0)
FAIRNESS = FairnessSettings(preempt_after_seconds=0.25, reserved_share=0.25, contention_seconds=10.0)


class ClassRig(CoreRig):
    """One shard with a batch of 4. All requests are of one tenant, so that only classes tell them apart."""

    def __init__(self, *classes: PriorityClass, **config: Any) -> None:
        super().__init__(
            **({"fairness": FAIRNESS, "policy": "least_requests", "classes": classes or (GOLD, PLAIN, FLEX)} | config)
        )
        self.add_shard("s0", max_batch=4)
        self.num_slots = 0
        self.slots: dict[str, int] = {}

    def ask(self, name: str, priority_class: PriorityClass, **changes: Any) -> list[Action]:
        self.num_slots += 1
        fields = {"slots": [self.num_slots], "tenant": "t", "max_tokens": 90, "priority_class": priority_class}
        return self._note(self.submit(name, **(fields | changes)))

    def fill(self, priority_class: PriorityClass, num_requests: int = 8) -> None:
        for i in range(num_requests):
            self.ask(f"{priority_class.name}-{i}", priority_class)
        for name in list(self.slots)[:4]:
            self.start("s0", self.slots[name])

    def end(self, name: str) -> list[str]:
        return dispatched(self._note(self.finish("s0", self.slots[name])))

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self._note(self.handle(Tick()))

    def end_preempted(self, preempted: SequencesPreempted) -> list[Action]:
        ended = [Finish(slot, 3) for slot in preempted.slots]
        return self._note(self.step("s0", finishes=ended))

    def _note(self, actions: list[Action]) -> list[Action]:
        self.slots |= {a.request.request_id: a.choices[0].slot for a in actions if isinstance(a, SubmitAttempt)}
        return actions


def dispatched(actions: Sequence[Action]) -> list[str]:
    return [action.request.request_id for action in actions if isinstance(action, SubmitAttempt)]


def test_more_urgent_classes_go_first() -> None:
    """That is what a rank says."""
    rig = ClassRig(fairness=None)
    rig.fill(PLAIN)
    for name, priority_class in (("f", FLEX), ("p", PLAIN), ("g", GOLD)):
        assert dispatched(rig.ask(name, priority_class)) == []
    assert [rig.end(f"plain-{i}") for i in range(3)] == [["g"], ["p"], ["f"]]


def test_waiting_makes_a_request_more_urgent() -> None:
    """A stream of urgent requests must not keep a less urgent one waiting for ever."""
    rig = ClassRig(fairness=None)
    rig.fill(PLAIN)
    rig.ask("f", FLEX)
    served: list[str] = []
    for number in range(12):
        rig.ask(f"p{number}", PLAIN)
        rig.now += 1.0
        served += rig.end(list(rig.slots)[number])
    assert "f" in served
    assert served.index("f") >= 4


def test_without_aging_there_is_none() -> None:
    """The built-in classes behave as tiers always have."""
    rig = ClassRig(fairness=None)
    rig.fill(PLAIN)
    rig.ask("f", PriorityClass("never", 2))
    for number in range(12):
        rig.ask(f"p{number}", PLAIN)
        rig.now += 4.0
        assert rig.end(list(rig.slots)[number]) == [f"p{number}"]


@pytest.mark.parametrize(("weight", "expected"), [(1.0, 6), (3.0, 9)])
def test_classes_of_one_rank_share_by_weight(weight: float, expected: int) -> None:
    """A weight divides the service, whatever waits."""
    heavy, light = PriorityClass("heavy", 1, weight=weight), PriorityClass("light", 1)
    rig = ClassRig(heavy, light, fairness=None)
    rig.fill(PLAIN)
    for number in range(20):
        rig.ask(f"light{number}", light)
        rig.ask(f"heavy{number}", heavy)
    served = [name for number in range(12) for name in rig.end(list(rig.slots)[number])]
    assert abs(sum(name.startswith("heavy") for name in served) - expected) <= 1


def test_a_more_urgent_class_gets_the_places_of_a_less_urgent_one() -> None:
    """Otherwise long answers of a class that can wait would keep one that cannot from starting."""
    rig = ClassRig()
    rig.fill(FLEX)
    assert dispatched(rig.ask("g", GOLD)) == []
    assert not has(rig.wait(0.2), SequencesPreempted)
    preempted = only(rig.wait(0.06), SequencesPreempted)
    actions = rig.end_preempted(preempted)
    assert dispatched(actions) == ["g"]
    assert not has(rig.log, RequestEnded)


def test_a_preempted_answer_continues_after_its_tokens() -> None:
    """Scheduling ends no stream: the client gets every token once, only later."""
    rig = ClassRig()
    rig.fill(FLEX, 4)
    for i in range(5):
        rig.ask(f"g{i}", GOLD)
    rig.wait(0.3)
    gone = [a for a in rig.log if isinstance(a, SequencesPreempted)]
    assert gone
    names = [name for name, slot in rig.slots.items() if any(slot in one.slots for one in gone)]
    for one in gone:
        rig.end_preempted(one)
    for _ in range(200):
        rig.wait(1.0)
        for name in [name for name in rig.slots if name.startswith("g")]:
            rig.end(name)
            del rig.slots[name]
    again = [a for a in rig.log if isinstance(a, SubmitAttempt) and a.attempt_id == 2]
    assert {a.request.request_id for a in again} >= set(names)
    assert all(a.choices[0].output_token_ids == (7,) for a in again if a.request.request_id in names[:1])
    assert not any(a.error_reason for a in rig.log if isinstance(a, RequestEnded))


def test_an_answer_that_has_waited_long_keeps_its_place() -> None:
    """Its own aging protects a request, so that it is done at last."""
    rig = ClassRig()
    rig.fill(FLEX, 4)
    rig.now += 10.0
    rig.ask("g", GOLD)
    for i in range(5):
        rig.ask(f"g{i}", GOLD)
    assert not has(rig.wait(0.3), SequencesPreempted)


def test_no_answer_is_preempted_for_ever() -> None:
    """A class that never ages is preempted MAX_MOVES times at most."""
    never = PriorityClass("never", 2)
    rig = ClassRig(GOLD, never)
    rig.fill(never, 4)
    num_preempted = 0
    for i in range(120):
        rig.ask(f"g{i}", GOLD)
        actions = rig.wait(0.3)
        for preempted in [a for a in actions if isinstance(a, SequencesPreempted)]:
            num_preempted += len(preempted.slots)
            rig.end_preempted(preempted)
        rig.wait(11.0)
        if f"g{i}" in rig.slots:
            rig.end(f"g{i}")
    assert 0 < num_preempted <= 4 * MAX_MOVES


def test_a_floor_is_left_to_its_class_while_it_has_work() -> None:
    """A reserved share means that the next request of the class finds a place."""
    reserving = PriorityClass("reserving", 1, reserved_share=0.5)
    rig = ClassRig(reserving, PLAIN)
    rig.ask("r", reserving)
    for i in range(8):
        rig.ask(f"p{i}", PLAIN)
    assert sum(name.startswith("p") for name in rig.slots) == 2
    assert dispatched(rig.ask("r2", reserving)) == ["r2"]


def test_a_floor_is_given_up_when_its_class_has_gone() -> None:
    """What no one uses would be wasted."""
    reserving = PriorityClass("reserving", 1, reserved_share=0.5)
    rig = ClassRig(reserving, PLAIN)
    rig.ask("r", reserving)
    for i in range(8):
        rig.ask(f"p{i}", PLAIN)
    rig.end("r")
    rig.wait(10.1)
    assert sum(name.startswith("p") for name in rig.slots) == 8


def test_a_floor_that_is_taken_is_left_free_no_longer() -> None:
    """When the class that others leave blocks to is sent there, what waited beside those blocks is placed in the same
    event, as the rig checks: another event may not come for long."""
    gold = PriorityClass("gold", 0, reserved_share=0.25)
    rig = ClassRig(gold, PLAIN, fairness=None, policy="ect", prefill_chunks=None)
    rig.add_shard("s1", block_size=512, num_blocks=24, max_batch=8, max_model_len=10**5, model="large")
    rig.handle(LoadReported("s1", ShardLoad(num_available_blocks=24)))

    def ask(name: str, priority_class: PriorityClass, num_blocks: int, num_choices: int = 1) -> list[str]:
        prompt, first = range(num_blocks * 512), 10 * rig.num_slots
        slots = list(range(first, first + num_choices))
        actions = rig.ask(name, priority_class, model="large", prompt_token_ids=[first, *prompt[1:]], slots=slots)
        return dispatched(actions)

    assert ask("running", PLAIN, 13) == ["running"]
    assert ask("gold", gold, 10, num_choices=3) == []
    assert ask("plain", PLAIN, 6) == []
    rig.handle(LoadReported("s1", ShardLoad(num_available_blocks=11, num_running=1, num_own_running=1)))
    rig.now += 1.0
    actions = rig.start("s1", rig.slots["running"])
    assert dispatched(actions) == ["gold"]
    rig.now += 1.0
    assert dispatched(rig.start("s1", submitted(actions)[1][0])) == ["plain"]


def test_a_class_has_a_limit_of_waiting() -> None:
    """A class whose answers are worth nothing late is told early."""
    hasty = PriorityClass("hasty", 1, max_queue_seconds=1.0)
    rig = ClassRig(hasty, PLAIN, fairness=None)
    rig.fill(PLAIN)
    rig.ask("h", hasty)
    rig.ask("p", PLAIN)
    assert only(rig.wait(1.1), RequestEnded).request_id == "h"
