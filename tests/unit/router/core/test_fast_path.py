"""The fast path and deferred frames: what is done later must have the same result as if it were done at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvloom.router_link.deferred_token_log import MAX_FRAMES
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH
from router.core.actions import Action, CancelOnShard, ScreenAnswers, SendStep, SubmitAttempt
from router.core.core import CoreConfig, RouterCore
from router.core.events import (
    ChoiceSpec,
    ClientGone,
    FrameArrived,
    KvChange,
    KvEventsArrived,
    KvSnapshotArrived,
    LoadReported,
    Request,
    RequestArrived,
    SafetyUp,
    ShardDescription,
    ShardDown,
    ShardLoad,
    ShardUp,
    SlotsCancelled,
    StepArrived,
    Tick,
    TokensOnlyFrame,
)
from router.core.frames import Finish, Start, Step
from router.core.rule_settings import HealthSettings
from router.links.prefilter import Prefilter
from tests.fakes.core_rig import CoreRig, only, sent, submitted

NUM_TOKENS = MAX_FRAMES + 8


def fast_path_rig(*slots: int, safety: bool = False) -> tuple[CoreRig, list[int]]:
    """Requests on shard s0 that have had a first token, and their slots there."""
    rig = CoreRig(safety=None if safety else (False, False))
    if safety:
        rig.handle(SafetyUp(False, True, Prefilter(["forbidden"], [])))
    rig.add_shard(max_model_len=1000)
    shard_slots = [submitted(rig.submit(f"r{slot}", slots=[slot], max_tokens=500))[1][0] for slot in slots]
    for slot in shard_slots:
        rig.start("s0", slot)
    return rig, shard_slots


@pytest.mark.parametrize("safety", [False, True])
def test_a_resumed_answer_has_all_tokens_of_the_fast_path(safety: bool) -> None:
    """The tokens are written to the failover buffer many frames late."""
    rig, slots = fast_path_rig(1, 2, safety=safety)
    for number in range(NUM_TOKENS):
        step = sent(rig.step("s0", *[(slot, [100 * slot + number], "ab") for slot in slots]))
        assert step.slots == [1, 2]
        assert step.token_ids == [100 * slot + number for slot in slots]
    rig.add_shard("s1", max_model_len=1000)
    again = [action for action in rig.handle(ShardDown("s0")) if isinstance(action, SubmitAttempt)]
    choices = {action.choices[0].slot: action.choices[0] for action in again}
    assert len(choices) == 2
    found = sorted(tuple(choice.output_token_ids) for choice in choices.values())
    assert found == sorted((7, *(100 * slot + number for number in range(NUM_TOKENS))) for slot in slots)
    assert {choice.num_delivered_chars for choice in choices.values()} == {1 + 2 * NUM_TOKENS}


def test_a_cancel_reports_how_many_tokens_arrived() -> None:
    """Its tokens wait in frames that it shares with answers that continue."""
    rig, slots = fast_path_rig(1, 2)
    for number in range(5):
        rig.step("s0", *[(slot, [number], "a") for slot in slots])
    cancel = only(rig.handle(SlotsCancelled("c", [1])), CancelOnShard)
    assert (cancel.slots, cancel.num_output_tokens) == ([slots[0]], [6])
    assert sent(rig.step("s0", *[(slot, [9], "a") for slot in slots])).slots == [2]
    for number in range(5):
        rig.step("s0", (slots[1], [number], "a"))
    assert rig.step("s0", finishes=[Finish(slots[0], FINISH_REASON_LENGTH)]) == []
    finished = sent(rig.step("s0", finishes=[Finish(slots[1], FINISH_REASON_LENGTH)]))
    assert [finish.num_output_tokens for finish in finished.finishes] == [12]


def test_suspicious_text_takes_only_its_sequence_off_the_fast_path() -> None:
    """The safety service is sent the amount of skipped text; the other sequences of the frame stay on the fast path."""
    rig, slots = fast_path_rig(1, 2, safety=True)
    for number in range(3):
        rig.step("s0", *[(slot, [number], "abc") for slot in slots])
    actions = rig.step("s0", (slots[0], [8], "a for"), (slots[1], [9], "abc"))
    assert sent(actions).slots == [2]
    screened = only(actions, ScreenAnswers)
    assert list(screened.deltas) == ["a for"]
    assert [skip[1:] for skip in screened.skips] == [(10, "c")]
    actions = rig.step("s0", *[(slot, [2], "abc") for slot in slots])
    assert sent(actions).slots == [2]


def test_frames_for_several_clients_are_deferred_too() -> None:
    """With several edges nearly every frame is of this kind. When all but one client have disconnected, frames are
    passed on whole."""
    rig = CoreRig(safety=None)
    rig.handle(SafetyUp(False, True, Prefilter(["forbidden"], [])))
    rig.add_shard(max_model_len=1000)
    slots = [submitted(rig.submit(name, client_id=name, max_tokens=500))[1][0] for name in ("c", "d", "e")]
    for slot in slots:
        rig.start("s0", slot)
        rig.step("s0", (slot, [1], "a"))
    num_read = 0

    def read_rest() -> Sequence[Any]:
        nonlocal num_read
        num_read += 1
        return ()

    def frame(wanted: Sequence[int]) -> list[tuple[str, list[int], list[int], list[str]]]:
        step = Step(list(wanted), [], [10 + slot for slot in wanted], [f"t{slot}" for slot in wanted])
        actions = [
            action for action in rig.handle(TokensOnlyFrame("s0", step, read_rest)) if isinstance(action, SendStep)
        ]
        return [(a.client_id, a.step.slots, a.step.token_ids, a.step.deltas) for a in actions]

    first, second, third = slots
    due = {slot: (name, [1], [10 + slot], [f"t{slot}"]) for slot, name in zip(slots, "cde", strict=True)}
    assert frame([second, first, third]) == [due[second], due[first], due[third]]
    assert frame([first, third]) == [due[first], due[third]]
    assert num_read == 0
    rig.handle(ClientGone("c"))
    assert num_read == 2
    assert frame([second, third]) == [due[second], due[third]]
    rig.handle(ClientGone("d"))
    assert frame([third]) == [due[third]]
    assert num_read == 3
    rig.core.check_integrity()
    assert rig.core._fleet.shards["s0"].fast_path.only_client is not None


class Script:
    """A random history of two shards and their requests, replayed to two cores: one of them gets tokens-only frames
    where they are possible."""

    def __init__(self, seed: int, clients: Sequence[str]) -> None:
        self.draw = random.Random(seed)
        self.clients = clients
        config = CoreConfig(health=HealthSettings(), max_queued_requests=20)
        self.cores = [RouterCore(config, seed=1), RouterCore(config, seed=1)]
        self.now = 1.0
        self.kv_numbers = {"s0": 0, "s1": 0}
        self.running: dict[str, list[int]] = {"s0": [], "s1": []}
        self.fresh: dict[str, list[int]] = {"s0": [], "s1": []}
        self.num_requests = 0
        self.num_tokens_only = 0
        both: list[Any] = [SafetyUp(False, True, Prefilter(["forbidden"], []))]
        for shard_id in self.running:
            both.append(ShardUp(ShardDescription(shard_id, "1", "m", 4, 200, 4, 1000)))
            both.append(KvSnapshotArrived(shard_id, 0, ()))
        for event in both:
            self.replay(event, event)

    def replay(self, tokens_only: Any, plain: Any) -> None:
        actions = [core.handle(event, self.now) for core, event in zip(self.cores, (tokens_only, plain), strict=True)]
        assert actions[0] == actions[1]
        self.note(actions[0])

    def note(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, SubmitAttempt):
                self.fresh[action.shard_id].append(action.choices[0].slot)
            elif isinstance(action, CancelOnShard):
                for slot in action.slots:
                    self.drop(action.shard_id, slot)
                    ended = StepArrived(action.shard_id, Step(finishes=[Finish(slot, FINISH_REASON_LENGTH)]))
                    self.replay(ended, ended)

    def drop(self, shard_id: str, slot: int) -> None:
        for slots in (self.running[shard_id], self.fresh[shard_id]):
            if slot in slots:
                slots.remove(slot)

    def arrive(self) -> None:
        self.num_requests += 1
        prompt = [self.draw.randrange(3) for _ in range(self.draw.randrange(4, 40))]
        choices = (ChoiceSpec(self.num_requests, 0),)
        client_id = self.draw.choice(self.clients)
        request = Request(f"r{self.num_requests}", client_id, "m", prompt, "text", choices, max_tokens=500)
        self.replay(RequestArrived(request), RequestArrived(request))

    def frame(self) -> None:
        draw = self.draw
        shard_id = draw.choice(list(self.running))
        slots = list(self.running[shard_id])
        starts, finishes = [], []
        if self.fresh[shard_id] and draw.random() < 0.3:
            slot = self.fresh[shard_id].pop()
            starts.append(Start(slot, 0, 0.001))
            self.running[shard_id].append(slot)
            slots.append(slot)
        elif slots and draw.random() < 0.05:
            finishes.append(Finish(slots[0], FINISH_REASON_LENGTH))
            self.running[shard_id].remove(slots[0])
        deltas = [draw.choice(["ab", "c", ""]) if draw.random() < 0.98 else "a for" for _ in slots]
        self.kv_numbers[shard_id] += 1
        blocks = [draw.randrange(1000) for _ in range(draw.randrange(1, 4))]
        changes = [KvChange(stored=blocks), KvChange(removed=[draw.randrange(1000)])]
        counts: dict[str, Any] = {
            "num_running": len(slots),
            "num_own_running": len(slots),
            "num_decode_context_tokens": draw.randrange(9),
        }
        load = ShardLoad(num_available_blocks=draw.randrange(200), **counts)
        rest = [KvEventsArrived(shard_id, self.kv_numbers[shard_id], changes), LoadReported(shard_id, load)]
        step = Step(slots, [], [draw.randrange(100) for _ in slots], deltas, [], starts, finishes)
        copy = Step(
            slots[:], [], step.token_ids[:], deltas[:], [], starts, [Finish(f.slot, f.reason) for f in finishes]
        )
        plain = FrameArrived(shard_id, [*rest, StepArrived(shard_id, copy)])
        self.num_tokens_only += step.is_plain
        self.replay(TokensOnlyFrame(shard_id, step, lambda: rest) if step.is_plain else plain, plain)

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            self.now += self.draw.choice([0.0, 0.001, 0.02, 0.3])
            kind = self.draw.random()
            if kind < 0.08:
                self.arrive()
            elif kind < 0.1:
                cancelled = SlotsCancelled(
                    self.draw.choice(self.clients), [self.draw.randrange(1, self.num_requests + 2)]
                )
                self.replay(cancelled, cancelled)
            elif kind < 0.15:
                self.replay(Tick(), Tick())
            else:
                self.frame()
            for core in self.cores:
                core.check_integrity()
            assert self.cores[0].next_deadline() == self.cores[1].next_deadline()


@pytest.mark.parametrize("clients", ["c", "cd"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))])
def test_deferred_frames_change_no_action(seed: int, clients: str) -> None:
    """Every action, placements included, equals that of a core that handles each frame as it arrives."""
    script = Script(seed, clients)
    script.run(300)
    assert script.num_tokens_only > 50
    first, second = script.cores
    assert first.shards == second.shards
    request = Request("next", "c", "m", [1] * 20, "text", (ChoiceSpec(9999, 0),))
    assert repr(first.plan(request, script.now)) == repr(second.plan(request, script.now))
