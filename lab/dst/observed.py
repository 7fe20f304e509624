"""The records of a witness: requests, choices and shards as they appear from outside the router core."""

from __future__ import annotations

import enum
from collections import Counter
from typing import NamedTuple

from router.core.core import CoreConfig
from router.core.events import ChoiceSpec, Request, ShardDescription, ShardLoad
from router.core.fleet.departure import MARGIN_SHARE
from router.core.fleet.fleet import OUTSTANDING_PER_BATCH
from router.core.fleet.shard_health import HealthState
from router.core.rule_settings import FairnessSettings


class State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    MOVING = enum.auto()
    """The current event has cancelled it on its shard: it continues elsewhere, or ends."""
    OVER = enum.auto()
    """No shard will produce more of it. Its finish is held back, or follows among the actions of the same event."""
    DONE = enum.auto()
    """The client has received its finish, or has disconnected."""


class ObservedChoice:
    """One choice of a request."""

    __slots__ = (
        "emitted",
        "finish_reason",
        "limit",
        "num_attempts",
        "num_moves",
        "num_sent_tokens",
        "num_starts",
        "num_strikes",
        "place",
        "placed_at",
        "request",
        "sent_text",
        "spec",
        "state",
    )

    def __init__(self, request: ObservedRequest, spec: ChoiceSpec) -> None:
        self.request = request
        self.spec = spec
        self.state = State.WAITING
        self.place: tuple[str, int] | None = None
        """Shard and slot while it runs."""
        self.emitted: list[int] = []
        """Tokens emitted by its attempts, each while it was the current one."""
        self.placed_at = 0.0
        """When its current attempt was dispatched, by the router's clock."""
        self.num_attempts = 0
        self.num_strikes = 0
        """Shards that were lost or failed with it, before it had any output."""
        self.num_moves = 0
        """Attempts that its shard or the router ended in order to move it."""
        self.limit: int | None = None
        """The maximum number of tokens of its last attempt."""
        self.num_starts = 0
        self.num_sent_tokens = 0
        self.sent_text = ""
        self.finish_reason = 0

    @property
    def num_failures(self) -> int:
        """Attempts that count against `max_attempts`, including the current one."""
        return self.num_attempts - self.num_moves

    @property
    def num_tokens(self) -> int:
        """Tokens that the request brought along, and tokens emitted since."""
        return len(self.spec.output_token_ids) + len(self.emitted)

    @property
    def is_at_limit(self) -> bool:
        return self.limit is not None and self.num_tokens >= self.limit


class AttemptDeparture(enum.Enum):
    """How an attempt ended that continues elsewhere."""

    FAILURE = "failure"
    DRAIN = "drain"
    """Its shard drained."""
    NOTICE = "notice"
    """Its shard had notice that it ends."""


class ObservedLeg(NamedTuple):
    """A prompt that one shard computes for the answer of another."""

    shard: ShardDescription
    slot: int
    began_at: float


class ObservedHandoff(NamedTuple):
    """The hand-off with which a leg has ended."""

    handoff: bytes
    shard: ShardDescription


class ObservedRequest:
    """A request that a router received."""

    __slots__ = (
        "arrived_at",
        "avoid_shard_id",
        "choices",
        "deadline",
        "had_notice",
        "handoff",
        "is_duplicate",
        "is_ending",
        "is_held",
        "left_by",
        "leg",
        "num_attempts",
        "num_ends",
        "num_legs",
        "num_prefill_chunks",
        "policy",
        "prefill_chunk",
        "queue_deadline",
        "request",
        "sent_handoff",
    )

    def __init__(self, request: Request, now: float, config: CoreConfig, policy: tuple[bool, bool] | None) -> None:
        self.request = request
        self.arrived_at = now
        self.deadline = now + (request.timeout_seconds or config.request_timeout_seconds)
        if request.objectives is not None:
            self.deadline = min(self.deadline, now + request.objectives.seconds_left)
        self.queue_deadline = min(self.deadline, now + config.max_queue_seconds)
        self.policy = policy
        """The policy of the safety service when the request arrived. It is not known which one was in force when a
        request ceased to be held: then the weakest since its arrival."""
        self.choices = [ObservedChoice(self, spec) for spec in request.choices]
        self.num_attempts = 0
        self.num_prefill_chunks = 0
        self.prefill_chunk: tuple[str, int] | None = None
        """Shard and slot of the prefill chunk that is running for it."""
        self.num_legs = 0
        self.leg: ObservedLeg | None = None
        """That for whose end it waits."""
        self.handoff: ObservedHandoff | None = None
        """The hand-off of its last leg, unless an attempt has used it or gone without."""
        self.sent_handoff: ObservedHandoff | None = None
        """That of its last attempt, which may come back unused."""
        self.avoid_shard_id = ""
        """The shard where it failed last."""
        self.is_duplicate = False
        self.is_ending = False
        self.is_held = False
        """True when it had to wait for a lease of its limits."""
        self.had_notice = False
        """True when a shard that it was on had notice: it may then move more often than otherwise."""
        self.left_by = AttemptDeparture.FAILURE
        """How it left its last shard when that ended its attempt."""
        self.num_ends = 0

    @property
    def is_waiting(self) -> bool:
        if self.leg is not None:
            return False
        return not self.is_ending and any(choice.state is State.WAITING for choice in self.choices)

    @property
    def is_continued(self) -> bool:
        """True when it brings along the beginning of an answer."""
        return any(choice.spec.output_token_ids for choice in self.choices)

    @property
    def is_believed(self) -> bool:
        """True when its beginning is believed: a process of the fabric says so, or a ticket proves it."""
        return self.is_continued and not self.request.num_claimed_tokens

    @property
    def has_deadline(self) -> bool:
        """True when its caller gave it one."""
        return self.request.objectives is not None and self.request.objectives.deadline_seconds is not None

    @property
    def may_be_impossible(self) -> bool:
        """True when it may be refused because its objectives cannot be met: no router has admitted it yet."""
        objectives = self.request.objectives
        if objectives is None or objectives.is_admitted or self.is_continued:
            return False
        return objectives.deadline_seconds is not None or objectives.ttft_seconds is not None

    def note_policy(self, screens_prompts: bool, screens_answers: bool) -> None:
        """A safety service has come."""
        if self.is_held and not self.was_dispatched:
            prompts, answers = self.policy or (True, True)
            self.policy = prompts and screens_prompts, answers and screens_answers

    @property
    def was_dispatched(self) -> bool:
        return self.num_attempts > 0 or self.num_prefill_chunks > 0 or self.num_legs > 0

    @property
    def has_begun(self) -> bool:
        """True when it has had an attempt or a leg: it does not give way to more urgent requests then."""
        return self.num_attempts > 0 or self.num_legs > 0

    @property
    def min_window(self) -> int:
        """The context window that a shard needs to run its queued and moving choices."""
        num_prompt_tokens = len(self.request.prompt_token_ids)
        if self.request.max_tokens is not None:
            return num_prompt_tokens + self.request.max_tokens
        states = (State.WAITING, State.MOVING)
        unfinished = [choice for choice in self.choices if choice.state in states and not choice.is_at_limit]
        return num_prompt_tokens + max((choice.num_tokens for choice in unfinished), default=0) + 1

    def choice(self, index: int) -> ObservedChoice:
        return next(choice for choice in self.choices if choice.spec.index == index)


class ObservedShard:
    """A shard that a router knows."""

    __slots__ = (
        "adapters",
        "contended_until",
        "description",
        "empty_by",
        "hands_over",
        "health",
        "is_draining",
        "is_withdrawn",
        "leg_tenants",
        "limit",
        "load",
        "num_reported_tokens",
        "open",
        "started",
    )

    def __init__(self, description: ShardDescription) -> None:
        self.description = description
        self.adapters: dict[str, str] = {}
        """The checksums of its adapters by name."""
        self.is_draining = False
        self.is_withdrawn = False
        """Its model is about to be unloaded."""
        self.hands_over = False
        """It drains and its deadline has passed, so that its sequences must move."""
        self.empty_by: float | None = None
        """By when what can move should have, as it has had notice; None: it has not."""
        self.load = ShardLoad(num_available_blocks=description.num_blocks)
        """The last load report."""
        self.num_reported_tokens: dict[int, int] = {}
        """By slot: the tokens that each sequence had when that report came."""
        self.started: set[int] = set()
        """Slots whose sequences have started."""
        self.contended_until = 0.0
        """Tenants compete for it at least until then."""
        self.health = HealthState.HEALTHY
        """The last state that the router reported."""
        self.limit = OUTSTANDING_PER_BATCH * description.max_batch
        """How many sequences it may have at most."""
        self.open: dict[int, ObservedChoice | None] = {}
        """The choices that the shard was sent and has not finished, by slot, including cancelled choices. None stands
        for a probe, a prefill chunk or a leg."""
        self.leg_tenants: dict[int, str] = {}
        """By slot: the tenants of the legs among them."""

    @property
    def has_room(self) -> bool:
        return len(self.open) < self.limit

    def may_finish_prefill_first(self, tenant: str) -> bool:
        """True when the shard may get no more of the tenant's, which has more than its share of the sequences there,
        before something that it was sent has started."""
        tenants = [one.request.request.tenant for one in self.open.values() if one is not None]
        tenants += self.leg_tenants.values()
        num_mine = tenants.count(tenant)
        return bool(self.open.keys() - self.started) and max(2, len(set(tenants))) * num_mine > len(self.open)

    def num_reserved_blocks(self, fairness: FairnessSettings) -> int:
        return max(1, int(self.description.num_blocks * fairness.reserved_share))

    @property
    def num_places(self) -> int:
        """The places of the batch that this router divides among its tenants; other routers divide the rest."""
        batch, num_own = self.description.max_batch, len(self.open)
        load = self.load
        num_foreign = max(0, load.num_waiting - load.num_own_waiting) + max(0, load.num_running - load.num_own_running)
        if num_own + num_foreign <= batch:
            return max(1, batch - num_foreign)
        return max(1, batch * num_own // (num_own + num_foreign))

    def num_blocks_to_divide_at_least(self) -> int:
        """The blocks that this router divides among its tenants; other routers divide the rest."""
        num_blocks, load = self.description.num_blocks, self.load
        if load.num_running <= load.num_own_running:
            return num_blocks
        choices = (choice for choice in self.open.values() if choice is not None)
        tenants = {choice.request.request.tenant for choice in choices}
        num_used = num_blocks - load.num_available_blocks
        return max(1, num_blocks - max(0, num_used - sum(map(self.num_held_blocks_at_least, tenants))))

    def num_free_blocks_at_least(self) -> int:
        """Returns the blocks that are free once everything that has not started has its own. Probes and prefill chunks
        may need any number."""
        num_free = self.load.num_available_blocks
        for slot, choice in self.open.items():
            if choice is None:
                return 0
            if slot not in self.started:
                num_free -= self._num_blocks(choice.request, max(other.num_tokens for other in choice.request.choices))
        return num_free

    def num_held_blocks_at_least(self, tenant: str) -> int:
        """Returns the blocks that the tenant's sequences held when the load was reported."""
        held = 0
        for slot in self.open:
            choice = self.current(slot)
            if choice is None or choice.request.is_ending:
                continue  # it may have left before the others were sent
            if choice.request.request.tenant == tenant and slot in self.num_reported_tokens:
                num_tokens = self.num_reported_tokens[slot]
                if len(choice.request.choices) == 1:  # choices share their prompt
                    num_tokens += len(choice.request.request.prompt_token_ids)
                held += -(-num_tokens // self.description.block_size)
        return held

    def num_held_blocks_at_most(self, tenant: str) -> int:
        """Returns the blocks that the tenant's sequences hold or will hold once they start."""
        choices = [choice for choice in map(self.current, self.open) if choice is not None]
        return sum(self.num_blocks(choice) for choice in choices if choice.request.request.tenant == tenant)

    def num_blocks(self, choice: ObservedChoice) -> int:
        """The blocks of a sequence that shares nothing."""
        return self._num_blocks(choice.request, choice.num_tokens)

    def _num_blocks(self, observed: ObservedRequest, num_tokens: int) -> int:
        return -(-(len(observed.request.prompt_token_ids) + num_tokens) // self.description.block_size)

    def note_notice(self, seconds: float | None, now: float) -> None:
        if seconds is None:
            self.empty_by = None
        elif self.empty_by is None:
            self.empty_by = now + (1.0 - MARGIN_SHARE) * seconds
            for choice in filter(None, map(self.current, self.open)):
                choice.request.had_notice = True

    def note_load(self, load: ShardLoad) -> None:
        self.load = load
        choices = ((slot, self.current(slot)) for slot in self.open)
        self.num_reported_tokens = {slot: choice.num_tokens for slot, choice in choices if choice is not None}

    def may_be_left_free(self, tenant: str, fairness: FairnessSettings | None) -> bool:
        """True when the tenant has its share of the shard, so that the rest of the batch or of the blocks is left to
        other tenants. Probes and prefill chunks may be anyone's."""
        if fairness is None:
            return False
        largest = max(self.description.max_model_len, 1) // self.description.block_size  # of what may be sent
        if self.num_free_blocks_at_least() - largest < self.num_reserved_blocks(fairness) and any(
            choice is None or choice.request.request.tenant == tenant for choice in self.open.values()
        ):
            return True
        num_places = self.num_places
        counts = Counter(choice.request.request.tenant for choice in self.open.values() if choice is not None)
        num_unknown = sum(choice is None for choice in self.open.values())
        share = max(1, num_places // max(2, len(counts) + num_unknown + (tenant not in counts)))
        is_nearly_full = len(self.open) >= num_places - max(1, int(num_places * fairness.reserved_share))
        return is_nearly_full and counts[tenant] + num_unknown >= share

    def ramp_up(self, num_started: int) -> None:
        """First tokens arrived: a shard with a low limit may have more sequences."""
        self.limit = min(self.limit + 2 * num_started, OUTSTANDING_PER_BATCH * self.description.max_batch)

    @property
    def is_suspected(self) -> bool:
        return self.health is HealthState.SUSPECTED

    @property
    def is_idle(self) -> bool:
        """True when it has no work from this router or any other."""
        return not self.open and not self.load.num_running and not self.load.num_waiting

    def current(self, slot: int) -> ObservedChoice | None:
        """The choice whose current attempt runs in this slot. None if it was cancelled, lost or never there."""
        choice = self.open.get(slot)
        if choice is None or choice.place != (self.description.shard_id, slot):
            return None
        return choice

    @property
    def computes_prompts(self) -> bool:
        """True when it computes prompts for other shards."""
        return self.description.role in ("prefill", "both")

    def can_fetch_from(self, other: ShardDescription) -> bool:
        """True when it can answer with the KV that another shard has computed."""
        own = self.description
        is_alike = (own.model, own.engine, own.variant) == (other.model, other.engine, other.variant)
        return own.role in ("decode", "both") and own.shard_id != other.shard_id and is_alike

    def has_adapter_of(self, request: ObservedRequest) -> bool:
        """True when it has the very adapter of the request, if that has one."""
        adapter = request.request.adapter
        return adapter is None or self.adapters.get(adapter.name) == adapter.checksum

    def can_take(self, request: ObservedRequest) -> bool:
        """True when it serves the model and the adapter, does not drain, and has a large enough window. It may have no
        room."""
        return (
            not self.is_draining
            and self.description.model == request.request.model
            and self.has_adapter_of(request)
            and self.description.max_model_len >= request.min_window
        )


def eligible(shards: dict[str, ObservedShard], request: ObservedRequest) -> list[ObservedShard]:
    """The shards that could run a request. A suspected one, or the one where the request has just failed, is included
    only if there is no other, and so is one that only computes prompts, or cannot use the hand-off."""
    able = [shard for shard in shards.values() if shard.can_take(request)]
    if any(shard.computes_prompts for shard in shards.values()):
        able = [shard for shard in able if shard.description.role != "prefill"] or able
        if request.handoff is not None:
            prefill = request.handoff.shard
            able = [shard for shard in able if shard.can_fetch_from(prefill)] or able
    able = [shard for shard in able if not shard.is_suspected] or able
    if request.avoid_shard_id and len(able) > 1:
        return [shard for shard in able if shard.description.shard_id != request.avoid_shard_id]
    return able
