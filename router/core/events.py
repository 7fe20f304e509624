"""What can happen to the router core. The service shell makes these from gRPC; simulators make them from nothing.

Every event goes through `RouterCore.handle(event, now)`, in one order, with `now` in monotonic seconds.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

from router.core.frames import Step


class Tier(enum.IntEnum):
    """The lower the number, the more urgent."""

    INTERACTIVE = 1
    BATCH = 2


@dataclasses.dataclass(frozen=True, slots=True)
class ChoiceSpec:
    """One wanted answer. `slot` is the client stream's."""

    slot: int
    index: int
    output_token_ids: Sequence[int] = ()
    num_delivered_chars: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A request as admitted: checked, tokenized, its seed drawn. The core never looks into `sampling` and `stop`."""

    request_id: str
    client_id: str
    """Which client stream it came over."""
    model: str
    prompt_token_ids: Sequence[int]
    prompt_text: str
    """What the safety service reads."""
    choices: Sequence[ChoiceSpec]
    max_tokens: int | None = None
    """Output tokens of one choice at most; None: what is left of the window."""
    sampling: object = None
    stop: object = None
    timeout_seconds: float = 0.0
    """From arrival to the last token; 0: the core's default."""
    tenant: str = ""
    traceparent: str = ""
    session_key: str = ""
    """Requests with one key belong together (a conversation). Only a hint: prefixes are found without it."""
    block_hashes: Mapping[int, Sequence[int]] | None = None
    """Block size → hashes of the prompt's full blocks, where they are known already (traces). None: the core hashes."""
    tier: Tier = Tier.INTERACTIVE


@dataclasses.dataclass(frozen=True, slots=True)
class ShardDescription:
    shard_id: str
    incarnation_id: str
    """Differs for every start of the process (frames of an earlier one must never be mixed in)."""
    model: str
    block_size: int
    num_blocks: int
    max_batch: int
    max_model_len: int
    capabilities: frozenset[str] = frozenset()


@dataclasses.dataclass(slots=True)
class ShardLoad:
    """See LoadReport in shard_service.proto."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_prefill_tokens: int = 0
    num_decode_context_tokens: int = 0
    num_available_blocks: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_step_seconds: float = 0.0
    draining: bool = False
    hand_over: bool = False
    """It drains, and what runs there is to go on elsewhere."""
    num_own_running: int = 0
    """The part of `num_running` that came over this router's stream; what is left is other routers'."""
    num_own_waiting: int = 0
    num_own_queued_prefill_tokens: int = 0
    num_own_decode_context_tokens: int = 0


# -- clients ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class RequestArrived:
    request: Request


@dataclasses.dataclass(frozen=True, slots=True)
class SlotsCancelled:
    """A client cancels some of its sequences. Slots not in use are ignored (their end is already on its way)."""

    client_id: str
    slots: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class RequestCancelled:
    """By name, from any client. `RouterCore.has_request` says whether it is there."""

    request_id: str
    client_id: str = ""
    """Only if it came over this client stream; "": whichever it came over."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClientGone:
    """The stream broke: all its requests are cancelled, nothing more is sent to it."""

    client_id: str


# -- shards -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class ShardUp:
    """The stream to a shard stands. A snapshot follows."""

    shard: ShardDescription


@dataclasses.dataclass(frozen=True, slots=True)
class ShardDown:
    """The stream to a shard broke: what ran there is lost."""

    shard_id: str


@dataclasses.dataclass(slots=True)
class StepArrived:
    shard_id: str
    step: Step


@dataclasses.dataclass(slots=True)
class KvChange:
    """One KV event: blocks stored, blocks removed, or (`cleared`) all of them gone."""

    stored: Sequence[int] = ()
    removed: Sequence[int] = ()
    cleared: bool = False


@dataclasses.dataclass(slots=True)
class KvEventsArrived:
    shard_id: str
    number: int
    changes: Sequence[KvChange]


@dataclasses.dataclass(frozen=True, slots=True)
class KvSnapshotArrived:
    shard_id: str
    number: int
    block_hashes: Sequence[int]


@dataclasses.dataclass(slots=True)
class LoadReported:
    shard_id: str
    load: ShardLoad


@dataclasses.dataclass(slots=True)
class FrameArrived:
    """What a shard has sent at once: the parts take effect in order, at one time."""

    shard_id: str
    parts: Sequence[KvSnapshotArrived | KvEventsArrived | LoadReported | StepArrived]


# -- safety -----------------------------------------------------------------------------------------------------------


class TextFilter(Protocol):
    """Tells text in which something may begin that the policy forbids. Exact in one direction: other text is clear."""

    def is_suspicious(self, text: str) -> bool:
        """`text` may be several deltas joined by NUL characters."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class SafetyUp:
    """The stream to the safety service stands, or its policy changed."""

    screens_prompts: bool
    screens_answers: bool
    prefilter: TextFilter | None = None
    """What it lets pass need not be screened; None: everything is."""
    prompt_filter: TextFilter | None = None
    """The prompts that it lets pass would be allowed; None: all have to be checked."""


@dataclasses.dataclass(frozen=True, slots=True)
class SafetyDown:
    """The stream broke: open checks and screenings get no verdict."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptVerdict:
    check_id: int
    allowed: bool
    message: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerHalt:
    slot: int
    num_clear_chars: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class AnswersScreened:
    """See ScreenResponse in safety_service.proto. `slots` are screening slots."""

    slots: Sequence[int]
    num_clear_chars: Sequence[int]
    halts: Sequence[AnswerHalt] = ()
    closed_slots: Sequence[int] = ()


# -- time -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Tick:
    """Time went on: expire deadlines, retry what waits."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrainStarted:
    """The router stops: new requests are refused, what runs goes on."""


@dataclasses.dataclass(frozen=True, slots=True)
class DrainEnded:
    """The router waits no longer: what still runs ends as DRAINING, so that clients take it to another router."""


Event = (
    RequestArrived
    | SlotsCancelled
    | RequestCancelled
    | ClientGone
    | ShardUp
    | ShardDown
    | StepArrived
    | KvEventsArrived
    | KvSnapshotArrived
    | LoadReported
    | FrameArrived
    | SafetyUp
    | SafetyDown
    | PromptVerdict
    | AnswersScreened
    | Tick
    | DrainStarted
    | DrainEnded
)
