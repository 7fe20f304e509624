"""The actions that the router core asks for. The shell carries them out over gRPC; the order within one list is kept
for each peer."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason
from router.core.events import ChoiceSpec, Request
from router.core.fleet.fleet import FleetChanged
from router.core.fleet.shard_health import HealthState
from router.core.frames import Finish, Step
from router.core.lease_messages import LeaseWant, LimitCount, SideCallDecided
from router.core.load.prediction import JudgedTerm, PlacementPrediction
from router.core.objectives import ObjectivesOutcome
from router.core.placement.plan import Pick, PlacementPlan
from router.core.priority_classes import INTERACTIVE, PriorityClass
from router.core.request_end import NO_MOVES, RelocationCounts, RequestEnd, end_of
from router.core.request_usage import RequestUsage


class SubmitAttempt(msgspec.Struct, frozen=True):
    """Dispatch a request to a shard. The slots in `choices` belong to the shard's stream."""

    shard_id: str
    attempt_id: int
    request: Request
    choices: Sequence[ChoiceSpec]
    max_tokens: int
    num_expected_cached_tokens: int
    prepares: str = ""
    """The name of the request of which this attempt only computes a prefill chunk in advance; "" for an ordinary
    attempt. The attempt_id is 0 then, and the token that ends it reaches no client."""
    prefill_only: bool = False
    """True hands the KV of the prompt to another shard. `prepares` is set then."""
    handoff: bytes = b""
    """Not empty: the KV of the prompt is fetched with it from the shard that has computed it. With the attempt_id 0, it
    is fetched only so that this shard frees it: the token that ends it reaches no client."""


class PlacementDecided(msgspec.Struct, frozen=True):
    """The reason for a placement, for explanations and the decision log. It precedes its SubmitAttempt, for the share
    of requests that CoreConfig.decision_sample_share names."""

    request: Request
    attempt_id: int
    pick: Pick
    """The pick at the time of the decision."""
    block_size: int
    """The block size of the picked shard."""
    block_hashes: Sequence[int]
    """Hashes of the prompt's full blocks of that size."""
    decided_at: float

    @property
    def plan(self) -> PlacementPlan:
        """The explanation of the placement; `plan.picked_shard_id` is the chosen shard. It is computed at each call."""
        return self.pick.plan


class CancelOnShard(msgspec.Struct, frozen=True):
    """Cancel sequences on a shard; slots are those of the shard's stream."""

    shard_id: str
    slots: Sequence[int]
    num_output_tokens: Sequence[int] = ()
    """For each slot, the number of output tokens that had arrived: tokens beyond them are wasted. Empty when the
    sequences continue on another shard."""


class WantKvSnapshot(msgspec.Struct, frozen=True):
    """Ask for a snapshot because KV event numbers had a gap."""

    shard_id: str


class SendStep(msgspec.Struct):
    """Progress for a client; slots belong to the client's stream. There is at most one per client and handled event."""

    client_id: str
    step: Step


class CheckPrompt(msgspec.Struct, frozen=True):
    """Ask the safety service for a verdict on a prompt."""

    check_id: int
    text: str
    tenant: str
    request_id: str = ""
    client_request_id: str = ""
    traceparent: str = ""
    guardrails: Sequence[str] = ()
    safety_identifier: str = ""
    tells_rules: bool = False


class AnswerScope(NamedTuple):
    """The owner of an answer that is screened in a slot."""

    slot: int
    tenant: str
    guardrails: Sequence[str] = ()
    safety_identifier: str = ""
    request_id: str = ""


class ScreenAnswers(msgspec.Struct, frozen=True):
    """Text for the safety service; slots are screening slots, which the core assigns."""

    slots: Sequence[int]
    deltas: Sequence[str]
    close_slots: Sequence[int] = ()
    skips: Sequence[tuple[int, int, str]] = ()
    """(slot, number of characters, the last of them): text that was cleared without the service and precedes the slot's
    delta."""
    scopes: Sequence[AnswerScope] = ()
    """Those of the slots that open."""


class RequestEnded(msgspec.Struct, frozen=True):
    """The single end of a request, from which metering and metrics are made. Metered tokens are delivered tokens."""

    request_id: str
    tenant: str
    model: str
    shard_id: str
    """The last shard; "" when the request was never dispatched."""
    num_attempts: int
    reason: FinishReason.ValueType
    error_reason: int
    """An ErrorReason; 0 = none."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    """Output tokens of all choices: exactly those that were sent to the client."""
    queue_time_seconds: float
    """Time from arrival to the first dispatch."""
    ttft_seconds: float | None
    e2e_latency_seconds: float
    max_tokens: int | None = None
    """The limit that the client asked for, per choice."""
    num_choices: int = 1
    client_id: str = ""
    """The client stream over which the request came."""
    client_request_id: str = ""
    traceparent: str = ""
    is_result_cache_hit: bool = False
    usage: RequestUsage | None = None
    """The facts that a usage record needs beyond this; None where no usage records are made."""
    is_admitted: bool = True
    moves: RelocationCounts = NO_MOVES
    priority_class: PriorityClass = INTERACTIVE
    objectives: ObjectivesOutcome | None = None
    """None: it had none."""
    prediction: PlacementPrediction | None = None
    """That of its first placement; None: it was never placed."""

    @property
    def end(self) -> RequestEnd:
        return end_of(self.reason, is_admitted=self.is_admitted, was_sent=self.num_attempts > 0)

    @property
    def judged_prediction(self) -> list[JudgedTerm]:
        """The predictions made when it was first placed, with what happened; [] if it was never placed."""
        if self.prediction is None:
            return []
        is_whole = self.num_attempts == 1 and self.reason in (FINISH_REASON_STOP, FINISH_REASON_LENGTH)
        return self.prediction.judge(self.queue_time_seconds, self.e2e_latency_seconds, is_whole=is_whole)


class LeasesWanted(msgspec.Struct, frozen=True):
    """Ask the owners of limits for leases, and give others back. Every want is answered by a LeasesGranted."""

    wants: Sequence[LeaseWant]


class LimitsCounted(msgspec.Struct, frozen=True):
    counts: Sequence[LimitCount]


class CompletedChoice(msgspec.Struct, frozen=True):
    """One choice of a complete answer."""

    index: int
    token_ids: Sequence[int]
    num_chars: int
    """The number of characters of its text."""
    finish: Finish


class AnswerCompleted(msgspec.Struct, frozen=True):
    """The whole answer of a request that arrived with a ticket, if all of its choices ended by themselves. It precedes
    the SendStep with its last finishes, so that what is set in one of them reaches the client."""

    ticket: object
    request: Request
    choices: Sequence[CompletedChoice]
    """In the order in which they have ended."""
    shard_id: str
    """The last shard; "" for an answer from the result cache."""
    is_result_cache_hit: bool
    is_exact: bool
    """True when its tokens are those of an answer that was neither moved nor cut short."""
    is_screened: bool
    """True when it was screened as a whole, as far as the policy wants it."""


class AnswerFlagged(msgspec.Struct, frozen=True):
    """An answer has ended in which the safety policy has found something while it was gated."""

    request: Request
    output: Sequence[tuple[int, Sequence[int]]]
    """By choice: its index, and the tokens that its client has."""
    shard_id: str
    is_exact: bool
    """True when its tokens come from one attempt that began with the prompt."""


class ShardHealthChanged(msgspec.Struct, frozen=True):
    """A shard is suspected, probed with a trickle of work, or healthy again."""

    shard_id: str
    state: HealthState
    symptom: str
    """The reason why the shard is not healthy; "" when it is."""


class MoveReason(enum.StrEnum):
    """Why requests were taken off a shard."""

    SUSPECTED = "suspected"
    HAND_OVER = "hand_over"
    """It drains, and the time for which they could stay has passed."""
    NOTICE = "notice"
    """It drains, and has to be empty soon."""


class RequestsMoved(msgspec.Struct, frozen=True):
    """Requests were taken off a shard and continue on others."""

    shard_id: str
    num_requests: int
    reason: MoveReason


class SequencesPreempted(msgspec.Struct, frozen=True):
    """Sequences of a tenant with more than its share left a shard for another tenant; they continue later. Their
    CancelOnShard is the action before."""

    shard_id: str
    tenant: str
    slots: Sequence[int]


class LegOutcome(enum.StrEnum):
    """Says what became of a prefill leg (dispatch/prefill_handoffs.py)."""

    USED = "used"
    """An attempt was sent with its hand-off."""
    FAILED = "failed"
    """Its shard refused it, or its engine failed."""
    NOTHING_HANDED_OVER = "nothing_handed_over"
    """The engine computed the prompt, and handed nothing over."""
    SHARD_LOST = "shard_lost"
    """Its shard was lost before the hand-off was used."""
    MOVED = "moved"
    """Its shard was suspected, or handed over its work."""
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    """Its request ended."""


class PrefillLegCounted(msgspec.Struct, frozen=True):
    """A prefill leg has begun, or has come to its single outcome."""

    shard_id: str
    """The prefill shard."""
    model: str
    outcome: LegOutcome | None = None
    """None: it has begun."""


class AnswerResampled(msgspec.Struct, frozen=True):
    """An answer continues on a shard that does not repeat what the one before would have computed: it is of another
    variant, since none of the same had room, or its engine repeats nothing. Its tokens may differ from those of an
    uninterrupted answer."""

    request_id: str
    from_shard_id: str
    from_variant: str
    shard_id: str
    variant: str
    client_request_id: str = ""
    traceparent: str = ""
    tenant: str = ""


class BrownoutStepChanged(msgspec.Struct, frozen=True):
    """A model is on another step of the brownout ladder."""

    model: str
    step: int
    """0: answers are no longer degraded."""
    previous_step: int
    fast_burn_rate: float
    slow_burn_rate: float


class RequestDegraded(msgspec.Struct, frozen=True):
    """The brownout ladder has an effect on a request that arrived."""

    model: str
    effects: Sequence[str]
    """The keys of the steps that had one."""


Action = (
    SubmitAttempt
    | PlacementDecided
    | CancelOnShard
    | WantKvSnapshot
    | SendStep
    | CheckPrompt
    | ScreenAnswers
    | FleetChanged
    | RequestEnded
    | LeasesWanted
    | LimitsCounted
    | SideCallDecided
    | AnswerCompleted
    | AnswerFlagged
    | ShardHealthChanged
    | RequestsMoved
    | SequencesPreempted
    | PrefillLegCounted
    | AnswerResampled
    | BrownoutStepChanged
    | RequestDegraded
)
