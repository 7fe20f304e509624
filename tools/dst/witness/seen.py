"""The entries of a witness: requests, choices and shards as they look from outside."""

from __future__ import annotations

import enum

from router.core.core import CoreConfig
from router.core.events import ChoiceSpec, Request, ShardDescription, ShardLoad
from router.core.fleet.fleet import OUTSTANDING_PER_BATCH
from router.core.fleet.shard_health import HealthState


class State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    MOVING = enum.auto()
    """The event at hand has cancelled it on its shard: it goes on elsewhere, or ends."""
    OVER = enum.auto()
    """No shard will say more; its end is held, or comes with the actions of the same event."""
    DONE = enum.auto()
    """The client has its finish, or has gone."""


class SeenChoice:
    __slots__ = (
        "emitted",
        "finish_reason",
        "limit",
        "num_attempts",
        "num_moves",
        "num_sent_tokens",
        "num_starts",
        "place",
        "placed_at",
        "request",
        "sent_text",
        "spec",
        "state",
    )

    def __init__(self, request: SeenRequest, spec: ChoiceSpec) -> None:
        self.request = request
        self.spec = spec
        self.state = State.WAITING
        self.place: tuple[str, int] | None = None
        """Shard and slot, while it runs."""
        self.emitted: list[int] = []
        """By the attempts that were its current one."""
        self.placed_at = 0.0
        """By the router's clock."""
        self.num_attempts = 0
        self.num_moves = 0
        """Attempts that its shard, or the router, ended by no fault of its own."""
        self.limit: int | None = None
        """Of its last attempt."""
        self.num_starts = 0
        self.num_sent_tokens = 0
        self.sent_text = ""
        self.finish_reason = 0

    @property
    def num_failures(self) -> int:
        """Attempts that count against it, the last one included."""
        return self.num_attempts - self.num_moves

    @property
    def num_tokens(self) -> int:
        """Given and emitted."""
        return len(self.spec.output_token_ids) + len(self.emitted)

    @property
    def is_at_limit(self) -> bool:
        return self.limit is not None and self.num_tokens >= self.limit


class SeenRequest:
    __slots__ = (
        "arrived_at",
        "avoid_shard_id",
        "choices",
        "deadline",
        "is_duplicate",
        "is_ending",
        "num_attempts",
        "num_ends",
        "num_prefill_chunks",
        "policy",
        "prefill_chunk",
        "queue_deadline",
        "request",
    )

    def __init__(self, request: Request, now: float, config: CoreConfig, policy: tuple[bool, bool] | None) -> None:
        self.request = request
        self.arrived_at = now
        self.deadline = now + (request.timeout_seconds or config.request_timeout_seconds)
        self.queue_deadline = min(self.deadline, now + config.max_queue_seconds)
        self.policy = policy
        """Of the safety service when it came."""
        self.choices = [SeenChoice(self, spec) for spec in request.choices]
        self.num_attempts = 0
        self.num_prefill_chunks = 0
        self.prefill_chunk: tuple[str, int] | None = None
        """Shard and slot where a part of its prompt is computed."""
        self.avoid_shard_id = ""
        """Where it failed last."""
        self.is_duplicate = False
        self.is_ending = False
        self.num_ends = 0

    @property
    def is_waiting(self) -> bool:
        return not self.is_ending and any(choice.state is State.WAITING for choice in self.choices)

    @property
    def was_dispatched(self) -> bool:
        return self.num_attempts > 0 or self.num_prefill_chunks > 0

    @property
    def min_window(self) -> int:
        """Window that a shard needs to run what waits of it, or moves."""
        num_prompt_tokens = len(self.request.prompt_token_ids)
        if self.request.max_tokens is not None:
            return num_prompt_tokens + self.request.max_tokens
        states = (State.WAITING, State.MOVING)
        going_on = [choice for choice in self.choices if choice.state in states and not choice.is_at_limit]
        return num_prompt_tokens + max((choice.num_tokens for choice in going_on), default=0) + 1

    def choice(self, index: int) -> SeenChoice:
        return next(choice for choice in self.choices if choice.spec.index == index)


class SeenShard:
    __slots__ = ("description", "hands_over", "health", "is_draining", "limit", "load", "open")

    def __init__(self, description: ShardDescription) -> None:
        self.description = description
        self.is_draining = False
        self.hands_over = False
        """It drains, and its deadline has passed."""
        self.load = ShardLoad()
        """As last reported."""
        self.health = HealthState.HEALTHY
        """As the router last judged it."""
        self.limit = OUTSTANDING_PER_BATCH * description.max_batch
        """Sequences that it is sent at most."""
        self.open: dict[int, SeenChoice | None] = {}
        """By slot: what was submitted and has not been finished by the shard, cancelled ones too. None: a probe, or a
        prefill chunk."""

    @property
    def has_room(self) -> bool:
        return len(self.open) < self.limit

    def ramp_up(self, num_started: int) -> None:
        """First tokens came: who gets a trickle of work gets more."""
        self.limit = min(self.limit + 2 * num_started, OUTSTANDING_PER_BATCH * self.description.max_batch)

    @property
    def is_suspected(self) -> bool:
        return self.health is HealthState.SUSPECTED

    @property
    def is_idle(self) -> bool:
        """It has nothing to do, for this router or any other."""
        return not self.open and not self.load.num_running and not self.load.num_waiting

    def current(self, slot: int) -> SeenChoice | None:
        """The choice whose news of this slot counts; None where it was cancelled, lost or never there."""
        choice = self.open.get(slot)
        if choice is None or choice.place != (self.description.shard_id, slot):
            return None
        return choice

    def can_take(self, request: SeenRequest) -> bool:
        """It is ready for requests of this kind, with room or without."""
        return (
            not self.is_draining
            and self.description.model == request.request.model
            and self.description.max_model_len >= request.min_window
        )


def eligible(shards: dict[str, SeenShard], request: SeenRequest) -> list[SeenShard]:
    """Shards that could run it: not those that are suspected, and not the one where it has just failed, unless there is
    no other."""
    able = [shard for shard in shards.values() if shard.can_take(request)]
    able = [shard for shard in able if not shard.is_suspected] or able
    if request.avoid_shard_id and len(able) > 1:
        return [shard for shard in able if shard.description.shard_id != request.avoid_shard_id]
    return able
