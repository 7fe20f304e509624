"""A RouterCore with short methods to feed it events and to read the actions it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import Action, SendStep, SubmitAttempt
from router.core.core import CoreConfig, RouterCore
from router.core.events import (
    ChoiceSpec,
    Event,
    KvSnapshotArrived,
    Request,
    RequestArrived,
    SafetyUp,
    ShardDescription,
    ShardUp,
    StepArrived,
)
from router.core.frames import Finish, Start, Step
from router.core.tenancy.limiter import Limiter

A = TypeVar("A")


class CoreRig:
    """Time stands still unless a test moves `now`. The invariants are checked after every event."""

    def __init__(
        self, *, safety: tuple[bool, bool] | None = (False, False), limiter: Limiter | None = None, **config: Any
    ) -> None:
        self.core = RouterCore(CoreConfig(**config), seed=1, limiter=limiter)
        self.now = 1.0
        self.log: list[Action] = []
        if safety is not None:
            self.handle(SafetyUp(*safety))

    def handle(self, event: Event) -> list[Action]:
        actions = self.core.handle(event, self.now)
        self.core.check_integrity()
        self.log += actions
        return actions

    def add_shard(self, shard_id: str = "s0", **changes: Any) -> None:
        description = {
            "shard_id": shard_id,
            "incarnation_id": "1",
            "model": "m",
            "block_size": 4,
            "num_blocks": 100,
            "max_batch": 4,
            "max_model_len": 100,
            "capabilities": frozenset({"seeded_resume"}),
        }
        self.handle(ShardUp(ShardDescription(**(description | changes))))
        self.handle(KvSnapshotArrived(shard_id, 0, []))

    def submit(self, request_id: str = "r", *, slots: Sequence[int] = (1,), **changes: Any) -> list[Action]:
        fields = {
            "request_id": request_id,
            "client_id": "c",
            "model": "m",
            "prompt_token_ids": [1, 2, 3, 4, 5],
            "prompt_text": "text",
            "choices": [ChoiceSpec(slot, index) for index, slot in enumerate(slots)],
            "max_tokens": 10,
        }
        return self.handle(RequestArrived(Request(**(fields | changes))))

    def step(self, shard_id: str, *entries: tuple[int, Sequence[int], str], **parts: Any) -> list[Action]:
        """Each entry is (shard slot, token ids, delta)."""
        counts = [len(ids) for _, ids, _ in entries]
        step = Step(
            slots=[slot for slot, _, _ in entries],
            num_tokens=[] if all(count == 1 for count in counts) else counts,
            token_ids=[token for _, ids, _ in entries for token in ids],
            deltas=[delta for _, _, delta in entries],
            **parts,
        )
        return self.handle(StepArrived(shard_id, step))

    def start(self, shard_id: str, slot: int, token_id: int = 7, delta: str = "a") -> list[Action]:
        """The first token of a sequence."""
        return self.step(shard_id, (slot, [token_id], delta), starts=[Start(slot, 4, 0.5)])

    def finish(
        self, shard_id: str, slot: int, reason: int = FinishReason.FINISH_REASON_STOP, stop_string: str = ""
    ) -> list[Action]:
        finish = Finish(slot, reason, stop_string=stop_string)
        return self.step(shard_id, finishes=[finish])

    def fail(self, shard_id: str, slot: int) -> list[Action]:
        error = KvloomError(ErrorReason.ERROR_REASON_ENGINE_FAILED, "broken")
        return self.step(shard_id, finishes=[Finish(slot, FinishReason.FINISH_REASON_ERROR, error=error)])


def only(actions: Sequence[Action], kind: type[A]) -> A:
    """The single action of a kind."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, f"{len(found)} x {kind.__name__} in {actions}"
    return found[0]


def has(actions: Sequence[Action], kind: type) -> bool:
    return any(isinstance(action, kind) for action in actions)


def sent(actions: Sequence[Action]) -> Step:
    """The step that one client is sent."""
    return only(actions, SendStep).step


def submitted(actions: Sequence[Action]) -> tuple[str, list[int]]:
    """The shard that got the request, and its slots there."""
    action = only(actions, SubmitAttempt)
    return action.shard_id, [choice.slot for choice in action.choices]
