"""When a tenant above its share gives way to others, as the core decides it. Time moves only here."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvloom.v1.error_reason_pb2 import ErrorReason
from router.core.actions import Action, CancelOnShard, RequestEnded, SequencesPreempted, SubmitAttempt
from router.core.core_config import NO_OVERLOAD_CONTROL
from router.core.dispatch.fair_shares import MAX_MOVES
from router.core.events import LoadReported, ShardLoad, Tick
from router.core.frames import Finish
from router.core.rule_settings import FairnessSettings
from tests.fakes.core_rig import CoreRig, has, only

SETTINGS = FairnessSettings(preempt_after_seconds=0.25, reserved_share=0.25, contention_seconds=10.0)


class FairRig(CoreRig):
    """One shard with a batch of 4, which is sent up to 8 sequences."""

    def __init__(self, settings: FairnessSettings | None = SETTINGS) -> None:
        overload = msgspec.structs.replace(NO_OVERLOAD_CONTROL, sheds_load_early=True)
        super().__init__(fairness=settings, overload=overload, policy="least_requests")
        self.add_shard("s0", max_batch=4)
        self.num_slots = 0

    def ask(self, name: str, tenant: str, num_choices: int = 1) -> list[Action]:
        slots = range(self.num_slots, self.num_slots + num_choices)
        self.num_slots += num_choices
        return self.submit(name, slots=slots, tenant=tenant, max_tokens=90)

    def fill(self, tenant: str, num_requests: int) -> list[int]:
        """Long answers of one tenant, the first four of which have begun. Returns their slots on the shard."""
        asked = [self.ask(f"{tenant}-{i}", tenant) for i in range(num_requests)]
        slots = [a.choices[0].slot for actions in asked for a in actions if isinstance(a, SubmitAttempt)]
        for slot in slots[:4]:
            self.start("s0", slot)
        return slots

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.handle(Tick())

    def report(self, **load: int) -> list[Action]:
        return self.handle(LoadReported("s0", ShardLoad(num_available_blocks=90, **load)))

    def end_slots(self, slots: Sequence[int]) -> list[Action]:
        """The shard confirms that it has stopped these sequences."""
        return self.step("s0", finishes=[Finish(slot, 3) for slot in slots])


def dispatched(actions: Sequence[Action]) -> list[str]:
    return [action.request.request_id for action in actions if isinstance(action, SubmitAttempt)]


def test_a_request_gets_the_place_of_a_tenant_that_has_filled_the_shard() -> None:
    """Otherwise one caller's long answers would make all others wait for minutes."""
    rig = FairRig()
    slots = rig.fill("big", 8)
    assert not has(rig.ask("small", "small"), SubmitAttempt)
    assert not has(rig.wait(0.2), SequencesPreempted)
    actions = rig.wait(0.06)
    preempted = only(actions, SequencesPreempted)
    assert (preempted.shard_id, preempted.tenant) == ("s0", "big")
    # The four that wait in the engine lose nothing; one that runs, the youngest, makes room in the batch.
    assert sorted(preempted.slots) == sorted(slots[3:])
    assert only(actions, CancelOnShard).slots == preempted.slots
    assert dispatched(rig.end_slots(preempted.slots)) == ["small"]


def test_a_preempted_answer_continues_after_its_tokens() -> None:
    """Its client must get every token once, only later."""
    rig = FairRig()
    slots = rig.fill("big", 8)
    rig.ask("small", "small")
    preempted = only(rig.wait(0.3), SequencesPreempted)
    actions = rig.end_slots(preempted.slots)
    small = only(actions, SubmitAttempt).choices[0].slot
    for slot in [*slots[:3], small]:
        actions = rig.finish("s0", slot)
        again = [a for a in actions if isinstance(a, SubmitAttempt) and a.request.request_id == "big-3"]
        if again:
            assert again[0].choices[0].output_token_ids == (7,)
            return
    raise AssertionError("the preempted answer was never continued")


def test_an_answer_with_all_its_tokens_is_not_preempted() -> None:
    """Tokens on the fast path are counted late. Such an answer ends by itself."""
    rig = FairRig()
    slots = rig.fill("big", 8)
    rig.ask("small", "small")
    for token_id in range(89):  # they have begun with one, and may have 90
        rig.step("s0", *((slot, [token_id], "x") for slot in slots[:4]))
    preempted = only(rig.wait(0.3), SequencesPreempted)
    assert sorted(preempted.slots) == sorted(slots[4:])


def test_a_request_that_waits_in_the_engine_is_helped_too() -> None:
    """A shard is sent more than its batch: there a request can wait as long as in the router."""
    rig = FairRig()
    slots = rig.fill("big", 7)
    assert dispatched(rig.ask("small", "small")) == ["small"]
    preempted = only(rig.wait(0.3), SequencesPreempted)
    assert sorted(preempted.slots) == sorted(slots[3:])


def test_a_lone_tenant_is_never_limited() -> None:
    """Fairness must not cost throughput while there is no one to be fair to."""
    rig = FairRig()
    rig.fill("big", 8)
    rig.ask("big-8", "big")
    assert not has(rig.wait(30.0), SequencesPreempted)


def test_tenants_with_like_demands_do_not_take_each_others_places() -> None:
    """Preempting to and fro would compute the same tokens again and again."""
    rig = FairRig()
    for i in range(4):
        rig.ask(f"a-{i}", "a")
        rig.ask(f"b-{i}", "b")
    rig.ask("a-4", "a")
    rig.ask("b-4", "b")
    assert not any(has(rig.wait(0.3), SequencesPreempted) for _ in range(10))


def test_while_tenants_compete_a_part_of_the_batch_is_left_to_the_small_ones() -> None:
    """The next request of the small tenant must not have to wait and preempt again."""
    rig = FairRig()
    rig.fill("big", 8)
    rig.ask("small", "small")
    actions = rig.end_slots(only(rig.wait(0.3), SequencesPreempted).slots)
    small = only(actions, SubmitAttempt).choices[0].slot
    assert not has(rig.finish("s0", small), SubmitAttempt)
    assert dispatched(rig.ask("small-2", "small")) == ["small-2"]


def test_after_the_competition_the_whole_shard_is_used_again() -> None:
    """What is left free for tenants that have gone would be wasted."""
    rig = FairRig()
    rig.fill("big", 8)
    rig.ask("small", "small")
    actions = rig.end_slots(only(rig.wait(0.3), SequencesPreempted).slots)
    rig.finish("s0", only(actions, SubmitAttempt).choices[0].slot)
    assert len(dispatched(rig.wait(10.0))) == 5


def test_a_choice_is_not_preempted_for_ever() -> None:
    """A steady stream of small requests must not keep a long answer from its end."""
    rig = FairRig()
    rig.fill("big", 8)
    num_preempted = 0
    for i in range(200):
        rig.ask(f"small-{i}", "small")
        actions = rig.wait(0.3)
        for preempted in [a for a in actions if isinstance(a, SequencesPreempted)]:
            num_preempted += len(preempted.slots)
            actions = rig.end_slots(preempted.slots)
        rig.wait(11.0)
    assert 0 < num_preempted <= 8 * MAX_MOVES


def test_the_queue_of_a_large_tenant_gets_no_other_refused() -> None:
    """A tenant that gives way must not make the others' waits look hopeless: they would be refused."""
    rig = FairRig()
    rig.fill("big", 20)
    for _ in range(100):
        rig.wait(0.1)
    assert only(rig.ask("big-20", "big"), RequestEnded).error_reason == ErrorReason.ERROR_REASON_QUEUE_FULL
    assert not has(rig.ask("small", "small"), RequestEnded)
    preempted = only(rig.wait(0.3), SequencesPreempted)
    assert dispatched(rig.end_slots(preempted.slots)) == ["small"]


def test_each_router_makes_room_in_its_part_of_a_shard() -> None:
    """Clients come through several routers, none of which fills the shard by itself."""
    rig = FairRig()
    slots = rig.fill("big", 3)
    rig.report(num_running=4, num_waiting=3, num_own_running=3)
    rig.ask("small", "small")
    preempted = only(rig.wait(0.3), SequencesPreempted)
    assert preempted.tenant == "big"
    assert 0 < len(preempted.slots) < len(slots)


def test_other_routers_sequences_do_not_count_as_the_tenants() -> None:
    """A tenant that has little at this router gives nothing back for what others fill."""
    rig = FairRig()
    rig.fill("big", 1)
    rig.report(num_running=4, num_waiting=4, num_own_running=1)
    rig.ask("small", "small")
    assert not has(rig.wait(0.3), SequencesPreempted)


def test_it_can_be_switched_off() -> None:
    """An operator with one tenant by design must be able to exclude it."""
    rig = FairRig(None)
    rig.fill("big", 8)
    rig.ask("small", "small")
    assert not has(rig.wait(30.0), SequencesPreempted)


def test_while_tenants_share_a_shard_the_larger_one_leaves_little_prefill_unfinished() -> None:
    """An engine prefills what it has in the order of its arrival: a request of another tenant must not wait for all of
    a flood."""
    rig = FairRig(msgspec.structs.replace(SETTINGS, competing_prefill_seconds=0.001))
    assert dispatched(rig.ask("small", "small")) == ["small"]
    sent = [rig.ask(f"big-{number}", "big") for number in range(4)]
    assert [len(dispatched(actions)) for actions in sent] == [1, 1, 0, 0]
    assert dispatched(rig.ask("other", "other")) == ["other"]
    for slot in (1, 2, 3):
        assert not has(rig.start("s0", slot), SubmitAttempt)
    assert dispatched(rig.start("s0", 4)) == ["big-2"]


def test_a_tenant_that_is_alone_again_is_not_held_back() -> None:
    """Short steps cost a little throughput, which buys nothing then."""
    rig = FairRig(msgspec.structs.replace(SETTINGS, competing_prefill_seconds=0.001))
    rig.ask("small", "small")
    rig.ask("big-0", "big")
    rig.finish("s0", 1)
    assert not dispatched(rig.ask("big-1", "big"))
    rig.start("s0", 2)
    rig.wait(SETTINGS.contention_seconds)
    assert [dispatched(rig.ask(f"big-{number}", "big")) for number in (2, 3)] == [["big-2"], ["big-3"]]
