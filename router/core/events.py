"""What can happen to the router core. The service shell makes these from gRPC; simulators make them from nothing.

Every event goes through `RouterCore.handle(event, now)`, in one order, with `now` in monotonic seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from router.core.frames import Step


class Tier(enum.IntEnum):
    """The lower the number, the more urgent."""

    INTERACTIVE = 1
    BATCH = 2


class ChoiceSpec(msgspec.Struct, frozen=True):
    """One wanted answer. `slot` is the client stream's."""

    slot: int
    index: int
    output_token_ids: Sequence[int] = ()
    num_delivered_chars: int = 0


class Request(msgspec.Struct, frozen=True):
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


class ShardDescription(msgspec.Struct, frozen=True):
    shard_id: str
    incarnation_id: str
    """Differs for every start of the process (frames of an earlier one must never be mixed in)."""
    model: str
    block_size: int
    num_blocks: int
    max_batch: int
    max_model_len: int
    capabilities: frozenset[str] = frozenset()


class ShardLoad(msgspec.Struct):
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


class RequestArrived(msgspec.Struct, frozen=True):
    request: Request


class SlotsCancelled(msgspec.Struct, frozen=True):
    """A client cancels some of its sequences. Slots not in use are ignored (their end is already on its way)."""

    client_id: str
    slots: Sequence[int]


class RequestCancelled(msgspec.Struct, frozen=True):
    """By name, from any client. `RouterCore.has_request` says whether it is there."""

    request_id: str
    client_id: str = ""
    """Only if it came over this client stream; "": whichever it came over."""


class ClientGone(msgspec.Struct, frozen=True):
    """The stream broke: all its requests are cancelled, nothing more is sent to it."""

    client_id: str


# -- shards -----------------------------------------------------------------------------------------------------------


class ShardUp(msgspec.Struct, frozen=True):
    """The stream to a shard stands. A snapshot follows."""

    shard: ShardDescription


class ShardDown(msgspec.Struct, frozen=True):
    """The stream to a shard broke: what ran there is lost."""

    shard_id: str


class StepArrived(msgspec.Struct):
    shard_id: str
    step: Step


class KvChange(msgspec.Struct):
    """Blocks stored (neighbours, or a few of different sequences), blocks removed, or (`cleared`) all of them gone."""

    stored: Sequence[int] = ()
    removed: Sequence[int] = ()
    cleared: bool = False


class KvEventsArrived(msgspec.Struct):
    shard_id: str
    number: int
    changes: Sequence[KvChange]


class KvSnapshotArrived(msgspec.Struct, frozen=True):
    shard_id: str
    number: int
    block_hashes: Sequence[int]


class LoadReported(msgspec.Struct):
    shard_id: str
    load: ShardLoad


class FrameArrived(msgspec.Struct):
    """What a shard has sent at once: the parts take effect in order, at one time."""

    shard_id: str
    parts: Sequence[KvSnapshotArrived | KvEventsArrived | LoadReported | StepArrived]


class TokensOnlyFrame(msgspec.Struct):
    """As FrameArrived, where all but the tokens may be taken in later: no sequence starts or ends, each has one token
    and no logprobs, no batch of KV events is missing before its own, the shard is not draining."""

    shard_id: str
    step: Step
    read_rest: Callable[[], Sequence[KvEventsArrived | LoadReported]]
    """What it says of its cache and its load, in order. Called once."""


# -- safety -----------------------------------------------------------------------------------------------------------


class TextFilter(Protocol):
    """Tells text in which something may begin that the policy forbids. Exact in one direction: other text is clear."""

    def is_suspicious(self, text: str) -> bool:
        """`text` may be several deltas joined by NUL characters."""
        ...


class SafetyUp(msgspec.Struct, frozen=True):
    """The stream to the safety service stands, or its policy changed."""

    screens_prompts: bool
    screens_answers: bool
    prefilter: TextFilter | None = None
    """What it lets pass need not be screened; None: everything is."""
    prompt_filter: TextFilter | None = None
    """The prompts that it lets pass would be allowed; None: all have to be checked."""


class SafetyDown(msgspec.Struct, frozen=True):
    """The stream broke: open checks and screenings get no verdict."""


class PromptVerdict(msgspec.Struct, frozen=True):
    check_id: int
    allowed: bool
    message: str = ""


class AnswerHalt(msgspec.Struct, frozen=True):
    slot: int
    num_clear_chars: int
    message: str


class AnswersScreened(msgspec.Struct, frozen=True):
    """See ScreenResponse in safety_service.proto. `slots` are screening slots."""

    slots: Sequence[int]
    num_clear_chars: Sequence[int]
    halts: Sequence[AnswerHalt] = ()
    closed_slots: Sequence[int] = ()


# -- time -------------------------------------------------------------------------------------------------------------


class Tick(msgspec.Struct, frozen=True):
    """Time went on: expire deadlines, retry what waits."""


class DrainStarted(msgspec.Struct, frozen=True):
    """The router stops: new requests are refused, what runs goes on."""


class DrainEnded(msgspec.Struct, frozen=True):
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
    | TokensOnlyFrame
    | SafetyUp
    | SafetyDown
    | PromptVerdict
    | AnswersScreened
    | Tick
    | DrainStarted
    | DrainEnded
)
