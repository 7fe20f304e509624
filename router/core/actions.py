"""What the router core wants done. The service shell turns these into gRPC; the order of one list is kept per peer."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvloom.v1.generation_pb2 import FinishReason
from router.core.events import ChoiceSpec, Request
from router.core.fleet.shard_health import HealthState
from router.core.frames import Step
from router.core.placement.pick import Pick
from router.core.placement.plan import Plan


class SubmitAttempt(msgspec.Struct, frozen=True):
    """Dispatch a request to a shard. The slots in `choices` are the shard stream's."""

    shard_id: str
    attempt_id: int
    request: Request
    choices: Sequence[ChoiceSpec]
    max_tokens: int
    num_expected_cached_tokens: int
    prepares: str = ""
    """The name of the request, if this is only a prefill chunk of its prompt, to be computed before it comes
    (attempt_id is 0 then, and nobody hears of the token that ends it)."""


class PlacementDecided(msgspec.Struct, frozen=True):
    """Why an attempt went where it went: for explanations and the decision log. Comes before its SubmitAttempt, for
    the share of requests that CoreConfig.decision_sample_share says."""

    request: Request
    attempt_id: int
    pick: Pick
    """As of the decision."""
    block_size: int
    """Of the picked shard."""
    block_hashes: Sequence[int]
    """Of the prompt's full blocks of that size."""
    decided_at: float

    @property
    def plan(self) -> Plan:
        """Its explanation: `plan.picked_shard_id` is where it went. Worked out anew whenever it is asked for."""
        return self.pick.plan


class CancelOnShard(msgspec.Struct, frozen=True):
    shard_id: str
    slots: Sequence[int]
    num_output_tokens: Sequence[int] = ()
    """Of each slot's sequence: as many as had arrived, whatever comes behind them is wasted. Empty: they go on
    elsewhere."""


class WantKvSnapshot(msgspec.Struct, frozen=True):
    """KV event numbers had a gap."""

    shard_id: str


class SendStep(msgspec.Struct):
    """News for a client; slots are the client stream's. At most one per client and handled event."""

    client_id: str
    step: Step


class CheckPrompt(msgspec.Struct, frozen=True):
    check_id: int
    text: str
    tenant: str


class ScreenAnswers(msgspec.Struct, frozen=True):
    """Text for the safety service; slots are screening slots, chosen by the core."""

    slots: Sequence[int]
    deltas: Sequence[str]
    close_slots: Sequence[int] = ()
    skips: Sequence[tuple[int, int, str]] = ()
    """(slot, characters, the last of them) that were cleared without it, before the slot's delta."""


class ModelState(msgspec.Struct, frozen=True):
    name: str
    num_ready_shards: int
    max_model_len: int
    capabilities: frozenset[str]


class FleetChanged(msgspec.Struct, frozen=True):
    """To be told to every client."""

    models: Sequence[ModelState]
    draining: bool


class RequestEnded(msgspec.Struct, frozen=True):
    """The request's one and only end: what metering and metrics are made of. billed tokens = delivered tokens."""

    request_id: str
    tenant: str
    model: str
    shard_id: str
    """The last one; "" when it was never dispatched."""
    num_attempts: int
    reason: FinishReason.ValueType
    error_reason: int
    """ErrorReason; 0 = none."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    """Of all choices: exactly those that were sent to the client."""
    queue_time_seconds: float
    """Arrival to first dispatch."""
    ttft_seconds: float | None
    e2e_latency_seconds: float
    max_tokens: int | None = None
    """As asked for, of one choice."""
    num_choices: int = 1
    client_id: str = ""
    """Which client stream it came over."""


class ShardHealthChanged(msgspec.Struct, frozen=True):
    """A shard is suspected, probed with a trickle of work, or healthy again."""

    shard_id: str
    state: HealthState
    symptom: str
    """Why it is not healthy; "" when it is."""


class RequestsMoved(msgspec.Struct, frozen=True):
    """Requests were taken off a shard and go on elsewhere."""

    shard_id: str
    num_requests: int


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
    | ShardHealthChanged
    | RequestsMoved
)
