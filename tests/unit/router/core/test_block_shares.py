"""When a tenant that holds a shard's KV blocks gives way to others, as the core decides it. Time moves only here."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.actions import Action, CancelOnShard, SequencesPreempted, SubmitAttempt
from router.core.dispatch.fair_shares import MAX_MOVES
from router.core.events import LoadReported, ShardLoad, Tick
from router.core.frames import Finish
from router.core.rule_settings import FairnessSettings
from tests.fakes.core_rig import CoreRig, has, only

SETTINGS = FairnessSettings(preempt_after_seconds=0.25, reserved_share=0.25, contention_seconds=10.0)


class BlockRig(CoreRig):
    """One shard with places for 16 sequences, and 32 blocks of 4 tokens: 8 are reserved while tenants compete."""

    def __init__(self, settings: FairnessSettings | None = SETTINGS) -> None:
        super().__init__(fairness=settings, policy="least_requests")
        self.add_shard("s0", max_batch=16, num_blocks=32)
        self.num_slots = 0

    def ask(self, name: str, tenant: str, num_choices: int = 1, num_prompt_tokens: int = 4) -> list[int]:
        """The slots on the shard; none if the request waits in the router."""
        slots = range(self.num_slots, self.num_slots + num_choices)
        self.num_slots += num_choices
        prompt = list(range(num_prompt_tokens))
        actions = self.submit(name, slots=slots, tenant=tenant, max_tokens=60, prompt_token_ids=prompt)
        return sent_slots(actions)

    def grow(self, slots: Sequence[int], num_tokens: int) -> None:
        for slot in slots:
            self.start("s0", slot)
            self.step("s0", (slot, [7] * (num_tokens - 1), "a"))

    def report(self, num_available: int, num_running: int = 0) -> list[Action]:
        load = ShardLoad(num_available_blocks=num_available, num_running=num_running, num_own_running=num_running)
        return self.handle(LoadReported("s0", load))

    def fill(self, tenant: str, num_sequences: int = 4, num_tokens: int = 28) -> list[int]:
        """Long answers that hold 8 blocks each."""
        slots = [slot for i in range(num_sequences) for slot in self.ask(f"{tenant}-{i}", tenant)]
        self.grow(slots, num_tokens)
        return slots

    def wait(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.handle(Tick())

    def end_slots(self, slots: Sequence[int]) -> list[Action]:
        """The shard confirms that it has stopped these sequences."""
        return self.step("s0", finishes=[Finish(slot, 3) for slot in slots])


def sent_slots(actions: Sequence[Action]) -> list[int]:
    return [spec.slot for action in actions if isinstance(action, SubmitAttempt) for spec in action.choices]


def test_a_request_gets_blocks_of_a_tenant_that_holds_all() -> None:
    """Twelve places of the batch are free, yet without blocks it would wait for the ends of long answers."""
    rig = BlockRig()
    slots = rig.fill("big")
    rig.report(0, num_running=4)
    assert rig.ask("small", "small")
    assert not has(rig.wait(0.2), SequencesPreempted)
    actions = rig.wait(0.06)
    preempted = only(actions, SequencesPreempted)
    # The youngest two, with 8 blocks each: what the request needs and the reserve of 8. Two, half the blocks, are left.
    assert (preempted.tenant, sorted(preempted.slots)) == ("big", sorted(slots[2:]))
    assert only(actions, CancelOnShard).slots == preempted.slots


def test_sequences_that_have_not_started_leave_first() -> None:
    """They lose nothing, and the engine would give them the blocks before the other tenant's request."""
    rig = BlockRig()
    rig.fill("big", num_sequences=3)
    unstarted = [slot for i in range(3) for slot in rig.ask(f"late-{i}", "big", num_prompt_tokens=8)]
    rig.report(8, num_running=3)
    rig.ask("small", "small")
    preempted = only(rig.wait(0.3), SequencesPreempted)
    assert len(unstarted) == 3
    assert set(preempted.slots) < set(unstarted)


def test_each_choice_of_a_request_counts() -> None:
    """One request with many choices must not take what many requests may not."""
    rig = BlockRig()
    slots = rig.ask("big", "big", num_choices=4)
    rig.grow(slots, 28)
    rig.report(0, num_running=4)
    rig.ask("small", "small")
    assert 0 < len(only(rig.wait(0.3), SequencesPreempted).slots) < 4


def test_no_more_are_preempted_until_the_shard_has_stopped_them() -> None:
    """Their blocks are free only then: asking again would stop twice as many as needed."""
    rig = BlockRig()
    rig.fill("big", num_sequences=8, num_tokens=12)
    rig.report(0, num_running=8)
    rig.ask("small", "small")
    first = only(rig.wait(0.3), SequencesPreempted)
    assert not has(rig.wait(0.3), SequencesPreempted)
    rig.end_slots(first.slots)
    assert not has(rig.wait(0.3), SequencesPreempted)  # no report since
    rig.report(0, num_running=6)
    assert has(rig.wait(0.3), SequencesPreempted)


def test_the_reserve_is_left_to_the_others_while_tenants_compete() -> None:
    """The next request of the small tenant must find blocks, not preempt again."""
    rig = BlockRig()
    rig.fill("big")
    rig.report(0, num_running=4)
    small = rig.ask("small", "small")
    preempted = only(rig.wait(0.3), SequencesPreempted)
    actions = rig.end_slots(preempted.slots)
    actions += rig.report(15, num_running=3)
    actions += rig.finish("s0", small[0])
    assert not sent_slots(actions)  # 8 more blocks of the large tenant's would leave 7
    assert rig.ask("small-2", "small")
    assert len(sent_slots(rig.wait(11.0))) == 2  # and afterwards the whole shard is used again


def test_a_lone_tenant_may_hold_all_blocks() -> None:
    """Fairness must not cost throughput while there is no one to be fair to."""
    rig = BlockRig()
    rig.fill("big")
    rig.report(0, num_running=4)
    assert rig.ask("big-4", "big")
    assert not has(rig.wait(30.0), SequencesPreempted)


def test_tenants_that_hold_like_amounts_do_not_take_each_others_blocks() -> None:
    """Preempting to and fro would compute the same tokens again and again."""
    rig = BlockRig()
    rig.fill("a", num_sequences=2)
    rig.fill("b", num_sequences=2)
    rig.report(0, num_running=4)
    rig.ask("a-9", "a")
    rig.ask("b-9", "b")
    assert not any(has(rig.wait(0.3), SequencesPreempted) for _ in range(10))


def test_a_choice_gives_its_blocks_back_a_bounded_number_of_times() -> None:
    """Others that come and come must not keep a long answer from its end."""
    rig = BlockRig()
    running = rig.fill("big")
    num_preempted = 0
    for i in range(100):
        rig.report(0, num_running=4)
        small = rig.ask(f"small-{i}", "small")
        actions = rig.wait(0.3)
        for preempted in [a for a in actions if isinstance(a, SequencesPreempted)]:
            num_preempted += len(preempted.slots)
            actions = rig.end_slots(preempted.slots)
        actions = [*rig.report(32), *rig.finish("s0", small[0]), *rig.wait(11.0)]
    assert running
    assert 0 < num_preempted <= 4 * MAX_MOVES


def test_it_can_be_switched_off() -> None:
    """An operator with one tenant by design must be able to exclude it."""
    rig = BlockRig(None)
    rig.fill("big")
    rig.report(0, num_running=4)
    rig.ask("small", "small")
    assert not has(rig.wait(30.0), SequencesPreempted)
