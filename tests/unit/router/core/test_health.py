"""Suspicion, migration and probes, as the core decides them. Time moves only here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import (
    Action,
    CancelOnShard,
    MoveReason,
    RequestEnded,
    RequestsMoved,
    SendStep,
    ShardHealthChanged,
    SubmitAttempt,
)
from router.core.dispatch.attempt_sender import PROBE_CLIENT_ID
from router.core.events import (
    ChoiceSpec,
    LoadReported,
    Request,
    RequestArrived,
    ShardDescription,
    ShardDown,
    ShardLoad,
    ShardUp,
    StepArrived,
    Tick,
)
from router.core.fleet.shard_health import HealthState
from router.core.frames import Finish, Start, Step
from router.core.rule_settings import HealthSettings
from tests.fakes.core_rig import CoreRig, has, only, sent

SETTINGS = HealthSettings(stall_seconds=1.0, slow_seconds=1.0, probe_seconds=1.0, num_probes=2, max_failures=3)


class HealthRig(CoreRig):
    """Shards s0, s1, ...; the policy least_requests spreads requests evenly."""

    def __init__(self, num_shards: int = 2, settings: HealthSettings = SETTINGS, **config: Any) -> None:
        super().__init__(health=settings, policy="least_requests", **config)
        for i in range(num_shards):
            self.add_shard(f"s{i}")

    def wait(self, seconds: float, *, alive: dict[str, Sequence[int]] | None = None) -> list[Action]:
        """Time passes; `alive` shards send a token of each of these slots every 50 ms."""
        actions: list[Action] = []
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.05
            for shard_id, slots in (alive or {}).items():
                actions += self.step(shard_id, *((slot, [7], "a") for slot in slots))
            actions += self.handle(Tick())
        return actions

    def begin(self, request_id: str, client_slot: int, **changes: object) -> tuple[str, int]:
        """A request that has its first token; returns its shard and slot."""
        submit = only(self.submit(request_id, slots=(client_slot,), **{"max_tokens": 90, **changes}), SubmitAttempt)
        self.start(submit.shard_id, submit.choices[0].slot)
        return submit.shard_id, submit.choices[0].slot

    def states(self, actions: Sequence[Action]) -> list[tuple[str, HealthState, str]]:
        return [(a.shard_id, a.state, a.symptom) for a in actions if isinstance(a, ShardHealthChanged)]

    def probes(self, actions: Sequence[Action]) -> list[SubmitAttempt]:
        return [a for a in actions if isinstance(a, SubmitAttempt) and a.request.client_id == PROBE_CLIENT_ID]


def moves(actions: Sequence[Action]) -> list[SubmitAttempt]:
    return [a for a in actions if isinstance(a, SubmitAttempt) and a.request.client_id != PROBE_CLIENT_ID]


def test_a_stalled_shard_is_suspected_and_its_request_continues_elsewhere() -> None:
    """The whole sequence: suspicion by silence, a cancel there, continuation after the delivered tokens, and
    fencing."""
    rig = HealthRig()
    shard_id, slot = rig.begin("r", 1)
    rig.step(shard_id, (slot, [8], "b"))
    other = "s1" if shard_id == "s0" else "s0"
    actions = rig.wait(1.3)
    assert rig.states(actions) == [(shard_id, HealthState.SUSPECTED, "stalled")]
    move = only(moves(actions), SubmitAttempt)
    assert (move.shard_id, move.attempt_id) == (other, 2)
    assert move.choices[0].output_token_ids == (7, 8)
    assert move.choices[0].num_delivered_chars == 2
    assert CancelOnShard(shard_id, [slot]) in actions
    assert only(actions, RequestsMoved) == RequestsMoved(shard_id, 1, MoveReason.SUSPECTED)
    late = rig.step(shard_id, (slot, [9], "c"), finishes=[Finish(slot, FinishReason.FINISH_REASON_STOP)])
    assert not has(late, SendStep)
    assert sent(rig.step(other, (move.choices[0].slot, [9], "c"))).token_ids == [9]


def test_a_suspected_shard_gets_nothing_new_and_the_plan_shows_why() -> None:
    """The reason is shown by `kvloom explain`."""
    rig = HealthRig()
    shard_id, _ = rig.begin("r", 1)
    rig.wait(1.3)
    for i in range(3):
        assert only(rig.submit(f"q{i}", slots=(10 + i,)), SubmitAttempt).shard_id != shard_id
    request = moves(rig.log)[0].request
    reasons = {shard.shard_id: shard.filtered_reason for shard in rig.core.plan(request, rig.now).shards}
    assert reasons[shard_id] == "suspected: stalled"


def test_silence_is_not_counted_while_prefill_is_due() -> None:
    """2,000 tokens at 1,000 per second take 2 seconds, in which the shard sends nothing."""
    rig = HealthRig(num_shards=0)
    for i in range(2):
        rig.add_shard(f"s{i}", max_model_len=10_000, num_blocks=10_000)
        rig.handle(LoadReported(f"s{i}", ShardLoad(prefill_tokens_per_second=1000.0)))
    rig.submit("r", prompt_token_ids=[1] * 2000, max_tokens=10)
    assert not rig.states(rig.wait(4.5))
    assert rig.states(rig.wait(4.0))


def test_prefill_that_shrinks_in_load_reports_is_progress() -> None:
    """The first token of a long prompt is far away, but its shard gets there."""
    rig = HealthRig()
    shard_id = only(rig.submit("r"), SubmitAttempt).shard_id
    for left in range(100, 0, -5):
        rig.handle(LoadReported(shard_id, ShardLoad(num_waiting=1, num_queued_prefill_tokens=left)))
        assert not rig.states(rig.wait(0.5))


def test_load_reports_that_only_grow_are_no_progress() -> None:
    """An engine hangs inside a process that does not: load reports continue, and count all that is submitted."""
    rig = HealthRig()
    shard_id, _ = rig.begin("r", 1)
    actions: list[Action] = []
    for i in range(6):
        rig.handle(LoadReported(shard_id, ShardLoad(num_running=1, num_queued_prefill_tokens=100 * i)))
        actions += rig.wait(0.3)
    assert rig.states(actions)[0] == (shard_id, HealthState.SUSPECTED, "stalled")


def test_an_idle_shard_is_never_suspected() -> None:
    """The silence of a shard without work means nothing, however long it lasts."""
    rig = HealthRig()
    shard_id, slot = rig.begin("r", 1)
    rig.finish(shard_id, slot)
    assert not rig.states(rig.wait(30.0))
    assert rig.core.next_deadline() is None


def test_a_suspended_router_suspects_no_shard() -> None:
    """After a pause, frames that arrived meanwhile lie unread: the clock jumped for this router, not for its shards."""
    rig = HealthRig()
    shard_id, slot = rig.begin("r", 1)
    rig.wait(0.3, alive={shard_id: [slot]})
    rig.now += 60.0
    assert not rig.states(rig.handle(Tick()))
    assert not rig.states(rig.wait(0.3, alive={shard_id: [slot]}))


def test_answered_probes_restore_a_shard_with_a_trickle_first() -> None:
    """Half-open: after the first probe in time the shard gets one request, after all of them it is healthy."""
    rig = HealthRig()
    shard_id, slot = rig.begin("r", 1)
    move = only(moves(rig.wait(1.3)), SubmitAttempt)
    rig.finish(move.shard_id, move.choices[0].slot)
    rig.finish(shard_id, slot, FinishReason.FINISH_REASON_CANCELLED)
    first = only(rig.probes(rig.wait(1.1)), SubmitAttempt)
    assert (first.shard_id, first.max_tokens) == (shard_id, 1)
    ended = rig.step(
        shard_id,
        (first.choices[0].slot, [1], ""),
        starts=[Start(first.choices[0].slot, 0, 0.0)],
        finishes=[Finish(first.choices[0].slot, FinishReason.FINISH_REASON_LENGTH)],
    )
    assert not has(ended, RequestEnded)
    assert not has(ended, SendStep)
    actions = rig.wait(0.2)
    assert rig.states(actions) == [(shard_id, HealthState.PROBING, "stalled")]
    second = only(rig.probes(actions), SubmitAttempt)
    actions = [*rig.finish(shard_id, second.choices[0].slot, FinishReason.FINISH_REASON_LENGTH), *rig.wait(0.2)]
    assert rig.states(actions) == [(shard_id, HealthState.HEALTHY, "")]
    sent_to = [only(rig.submit(f"q{i}", slots=(10 + i,)), SubmitAttempt).shard_id for i in range(3)]
    assert sent_to.count(shard_id) == 1
    assert not rig.probes(rig.wait(0.3, alive={"s0": [99], "s1": [99]}))


def test_missed_probes_back_off() -> None:
    """There is one probe at a time, and none while the previous one is unanswered: a shard that hangs must not pile
    them up."""
    rig = HealthRig()
    shard_id, slot = rig.begin("r", 1)
    rig.wait(1.3)
    rig.finish(shard_id, slot, FinishReason.FINISH_REASON_CANCELLED)
    sent_at: list[float] = []
    while len(sent_at) < 5:
        for probe in rig.probes(rig.wait(0.1)):
            sent_at.append(rig.now)
            rig.wait(1.2)
            rig.finish(shard_id, probe.choices[0].slot, FinishReason.FINISH_REASON_CANCELLED)
    gaps = [after - before for before, after in itertools.pairwise(sent_at)]
    assert all(after >= 1.5 * before for before, after in itertools.pairwise(gaps))


def test_moving_costs_no_attempt() -> None:
    """An answer with a single attempt allowed still leaves a shard that hangs: it has done nothing wrong."""
    rig = HealthRig(num_shards=3, max_attempts=1)
    first, _ = rig.begin("r", 1)
    move = only(moves(rig.wait(1.3)), SubmitAttempt)
    rig.start(move.shard_id, move.choices[0].slot)
    failed = rig.fail(move.shard_id, move.choices[0].slot)
    assert only(failed, RequestEnded).error_reason == ErrorReason.ERROR_REASON_ENGINE_FAILED
    assert first != move.shard_id


def test_a_shard_that_stops_costs_no_attempt() -> None:
    """A rolling restart ends what runs on every shard in turn."""
    rig = HealthRig(num_shards=2, max_attempts=1)
    shard_id, slot = rig.begin("r", 1)
    error = KvloomError(ErrorReason.ERROR_REASON_DRAINING, "stopped")
    for _ in range(5):
        actions = rig.step(shard_id, finishes=[Finish(slot, FinishReason.FINISH_REASON_ERROR, error=error)])
        move = only(actions, SubmitAttempt)
        assert move.shard_id != shard_id
        shard_id, slot = move.shard_id, move.choices[0].slot


def test_requests_spread_over_the_others_as_far_as_they_have_room() -> None:
    """There is no storm onto one shard; a request without room elsewhere stays until there is some."""
    rig = HealthRig(num_shards=0, settings=HealthSettings(stall_seconds=1.0, max_suspected_share=1.0))
    rig.add_shard("big", max_batch=8)
    slots = [rig.begin(f"r{i}", i + 1)[1] for i in range(16)]
    rig.add_shard("a", max_batch=4)
    rig.add_shard("b", max_batch=3)
    actions = rig.wait(1.3)
    assert [m.shard_id for m in moves(actions)].count("a") == 8
    assert [m.shard_id for m in moves(actions)].count("b") == 6
    stayed = set(slots) - {slot for a in actions if isinstance(a, CancelOnShard) for slot in a.slots}
    assert len(stayed) == 2
    done = moves(actions)[0]
    rig.finish(done.shard_id, done.choices[0].slot)
    assert len(moves(rig.wait(0.2, alive={m.shard_id: [m.choices[0].slot] for m in moves(actions)[1:]}))) == 1


def test_n_answers_of_a_request_move_together() -> None:
    """Each choice continues after its own tokens."""
    rig = HealthRig()
    submit = only(rig.submit("r", slots=(1, 2), max_tokens=90), SubmitAttempt)
    slots = [choice.slot for choice in submit.choices]
    rig.step(submit.shard_id, (slots[0], [5], "x"), (slots[1], [6, 7], "yz"), starts=[Start(s, 0) for s in slots])
    move = only(moves(rig.wait(1.3)), SubmitAttempt)
    assert [choice.output_token_ids for choice in move.choices] == [(5,), (6, 7)]


def test_only_a_share_of_the_shards_is_suspected() -> None:
    """When all shards seem to hang, the cause is the network or the machine: some shard must continue to serve."""
    rig = HealthRig(num_shards=5)
    for i in range(10):
        rig.begin(f"r{i}", i + 1)
    suspected = {shard_id for shard_id, *_ in rig.states(rig.wait(5.0))}
    assert len(suspected) == 2


def test_engine_failures_in_a_row_are_a_symptom() -> None:
    """Each request finds another shard by itself; later requests should not have to."""
    rig = HealthRig(num_shards=2, max_attempts=50)
    for i in range(30):
        submit = only(rig.submit(f"r{i}", slots=(i + 1,)), SubmitAttempt)
        while submit.shard_id == "s0":
            retried = rig.fail("s0", submit.choices[0].slot)
            submit = only(retried, SubmitAttempt)
        rig.finish(submit.shard_id, submit.choices[0].slot)
        rig.wait(0.1)
    assert rig.states(rig.log)[0] == ("s0", HealthState.SUSPECTED, "failing")


def slow_rig(num_shards: int, tokens_per_second: dict[str, int]) -> list[tuple[str, HealthState, str]]:
    """Two streams on every shard for 6 seconds, at these paces."""
    rig = HealthRig(num_shards, HealthSettings(stall_seconds=5.0, slow_seconds=2.0), max_attempts=1)
    on = [rig.begin(f"r{i}", i + 1, max_tokens=None) for i in range(2 * num_shards)]
    actions: list[Action] = []
    for tick in range(6 * 20):
        rig.now += 0.05
        for shard_id, per_second in tokens_per_second.items():
            slots = [slot for at, slot in on if at == shard_id]
            if tick % (20 // per_second) == 0 and tick < 80 * (20 // per_second):
                actions += rig.step(shard_id, *((slot, [7], "a") for slot in slots))
        actions += rig.handle(Tick())
    return rig.states(actions)


def test_ten_times_slower_than_the_others_is_a_symptom() -> None:
    """The shard answers, so no timeout ever detects it."""
    assert slow_rig(3, {"s0": 20, "s1": 20, "s2": 1})[0] == ("s2", HealthState.SUSPECTED, "slow")


@pytest.mark.parametrize("paces", [{"s0": 1, "s1": 1, "s2": 1}, {"s0": 20, "s1": 20, "s2": 4}])
def test_slow_together_or_a_little_slower_is_none(paces: dict[str, int]) -> None:
    """Overload slows all shards, and shards differ."""
    assert not slow_rig(3, paces)


def test_a_breaker_outlives_its_stream() -> None:
    """A shard that hangs and is reconnected is no better than before; a new process is."""
    rig = HealthRig()
    shard_id, _ = rig.begin("r", 1)
    rig.wait(1.3)
    rig.handle(ShardDown(shard_id))
    again = ShardUp(ShardDescription(shard_id, "1", "m", 4, 100, 4, 100))
    assert rig.states(rig.handle(again)) == [(shard_id, HealthState.SUSPECTED, "stalled")]
    assert rig.probes(rig.wait(0.2))
    rig.handle(ShardDown(shard_id))
    rig.add_shard(shard_id, incarnation_id="2")
    assert {shard.description.shard_id: shard.health for shard in rig.core.shards}[shard_id] is HealthState.HEALTHY


def test_a_shard_that_hands_over_is_emptied() -> None:
    """`kvloom drain --deadline-seconds`: requests that another shard has room for are moved there at once."""
    rig = HealthRig()
    shard_id, slot = rig.begin("r", 1)
    rig.handle(LoadReported(shard_id, ShardLoad(num_running=1, draining=True)))
    actions = rig.handle(LoadReported(shard_id, ShardLoad(num_running=1, draining=True, hand_over=True)))
    assert CancelOnShard(shard_id, [slot]) in actions
    assert only(moves(actions), SubmitAttempt).choices[0].output_token_ids == (7,)


def test_a_request_without_another_shard_is_not_handed_over() -> None:
    """A drain must not lose a request that only this shard can run."""
    rig = HealthRig(num_shards=1)
    shard_id, slot = rig.begin("r", 1)
    actions = rig.handle(LoadReported(shard_id, ShardLoad(num_running=1, draining=True, hand_over=True)))
    assert not has(actions, CancelOnShard)
    assert sent(rig.step(shard_id, (slot, [8], "b"))).token_ids == [8]


@pytest.mark.parametrize("seconds", [15.0, pytest.param(60.0, marks=pytest.mark.long)])
def test_2000_healthy_streams_trip_nothing(seconds: float) -> None:
    """Uneven batches, paces that vary several times over, prompts that take seconds, streams that start and end: all
    shards stay healthy."""
    rig = CoreRig(health=HealthSettings(), policy="least_requests", max_queued_requests=4000)
    core = rig.core
    num_shards = 8
    for i in range(num_shards):
        rig.add_shard(f"s{i}", max_batch=256, max_model_len=100_000, num_blocks=1_000_000)
    actions: list[Action] = []
    running: dict[str, dict[int, int]] = {f"s{i}": {} for i in range(num_shards)}

    def take(new_actions: list[Action]) -> None:
        actions.extend(new_actions)
        for action in new_actions:
            if isinstance(action, SubmitAttempt):
                running[action.shard_id][action.choices[0].slot] = -(len(action.choices[0].output_token_ids) + 1)

    names = iter(range(10**9))

    def ask() -> None:
        i = next(names)
        choices = [ChoiceSpec(i + 1, 0)]
        prompt = [1] * (5 + i % 7 * 10)
        take(core.handle(RequestArrived(Request(f"r{i}", "c", "m", prompt, "", choices, max_tokens=400)), rig.now))

    for _ in range(2000):
        ask()
    next_step = {shard_id: rig.now + 0.1 * (i + 1) for i, shard_id in enumerate(running)}
    end = rig.now + seconds
    while rig.now < end:
        shard_id = min(next_step, key=lambda name: next_step[name])
        rig.now = next_step[shard_id]
        # Steps of 0.1 to 0.45 seconds: shards differ, and every seventh step has prefill of others in it.
        next_step[shard_id] = rig.now + 0.1 + 0.05 * int(shard_id[1:])
        slots = running[shard_id]
        starts = [Start(slot, 0, 0.0) for slot, count in slots.items() if count < 0]
        step = Step(list(slots), [], [7] * len(slots), ["a"] * len(slots), starts=starts)
        for slot in list(slots):
            slots[slot] = 1 if slots[slot] < 0 else slots[slot] + 1
            if slots[slot] >= 400 or (slots[slot] > 50 and (slot * 7 + slots[slot]) % 211 == 0):
                del slots[slot]
                step.finishes.append(Finish(slot, FinishReason.FINISH_REASON_STOP))
        take(core.handle(StepArrived(shard_id, step), rig.now))
        for _ in step.finishes:
            ask()
        deadline = core.next_deadline()
        if deadline is not None and deadline <= rig.now:
            take(core.handle(Tick(), rig.now))
    assert sum(map(len, running.values())) == 2000
    assert not [action for action in actions if isinstance(action, ShardHealthChanged | RequestsMoved)]
