"""The events that the router core handles. The shell makes them from gRPC frames; simulators make them directly.

Every event goes through `RouterCore.handle(event, now)`, in one order, with `now` in monotonic seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from kvloom.adapters import Adapter, full_name
from kvloom.v1.generation_pb2 import RESULT_CACHE_USE_UNSPECIFIED, ResultCacheUse
from kvloom_common.kv_share import KvShare
from router.core.degradation import Degradation
from router.core.frames import Finish, Step
from router.core.lease_messages import LeaseGrant, LeaseName
from router.core.objectives import Objectives
from router.core.priority_classes import CLASS_OF_TIER, PriorityClass


class TierRank(enum.IntEnum):
    """Urgency classes: the lower the number, the more urgent."""

    JUDGE = 0
    """The router's own requests to models that judge texts (router/features/judges.py). As for those of shadow traffic,
    no answer reaches a client."""
    INTERACTIVE = 1
    BATCH = 2
    SHADOW = 3
    """The router's own requests (docs/how-to/shadow-traffic.md): no answer reaches a client, so nothing is screened,
    and they have no part in the fairness between tenants."""


SHADOW_TIER: Final = TierRank.SHADOW
JUDGE_TIER: Final = TierRank.JUDGE
"""Looking up the member of an enumeration takes calls, which every request would pay."""
SHADOW_TENANT: Final = "shadow\0"
"""The tenant of a request of shadow traffic begins with it; the tenant of the sampled request follows."""
SHADOW_CLIENT_ID: Final = "router-shadow"
JUDGE_CLIENT_ID: Final = "router-judge"
OWN_CLIENT_IDS: Final = frozenset({SHADOW_CLIENT_ID, JUDGE_CLIENT_ID})
"""The client names of the requests of those tiers."""


class CallReader(Protocol):
    """Finds the tool calls in the output of one choice."""

    def read(self, delta: str) -> tuple[bool, bool]:
        """(True when the output so far ends within a call, or within what may become one; True when a call has begun in
        this text)"""
        ...


class ChoiceSpec(msgspec.Struct, frozen=True):
    """One requested choice. `slot` belongs to the client's stream."""

    slot: int
    index: int
    output_token_ids: Sequence[int] = ()
    num_delivered_chars: int = 0


class Request(msgspec.Struct, frozen=True):
    """A request that was checked, tokenized and given a seed. The core never reads `stop`, and `sampling` only
    where an answer continues on another shard."""

    request_id: str
    client_id: str
    """The client stream over which the request came."""
    model: str
    prompt_token_ids: Sequence[int]
    prompt_text: str
    """The text that the safety service reads."""
    choices: Sequence[ChoiceSpec]
    max_tokens: int | None = None
    """The most output tokens of one choice; None: the rest of the window."""
    sampling: object = None
    stop: object = None
    images: Sequence[object] = ()
    """Those of the prompt, which the core does not read: their tokens tell them apart."""
    pooling: object = None
    """Not None: it asks for the embedding of its prompt, and its max_tokens is 0. Not read by the core, either."""
    timeout_seconds: float = 0.0
    """Time from arrival to the last token; 0: the core's default."""
    tenant: str = ""
    guardrails: Sequence[str] = ()
    """Rules of the safety policy that it names."""
    safety_identifier: str = ""
    """The tenant's user, for statistics of the safety policy."""
    tells_safety_rules: bool = False
    """Its client is told which rules of the safety policy hold, also if it names none."""
    key_id: str = ""
    """The tenant's key with which it was made, whose limits apply too; "" without tenants (docs/operate/limits.md)."""
    cache_salt: str = ""
    """Requests with different ones share no cached blocks."""
    kv_share: KvShare | None = None
    """The guaranteed share of every shard's blocks that its tenant has; None: it has none."""
    traceparent: str = ""
    client_request_id: str = ""
    """The id that the caller gave the request. It is only reported, and need not be unique."""
    session_key: str = ""
    """Requests with one key belong together (a conversation). It is only a hint: prefixes are found without it."""
    block_hashes: Mapping[int, Sequence[int]] | None = None
    """Block size → hashes of the prompt's full blocks, where they are known already (traces). None: the core computes
    them."""
    tier: TierRank = TierRank.INTERACTIVE
    """The tier decides the price, and the class if no other is named."""
    priority_class: PriorityClass | None = None
    """When it is served; None: as its tier says."""
    fairness_id: str = ""
    """Divides the requests of one tenant into sub-flows, which share what the tenant gets."""
    adapter: Adapter | None = None
    """The adapter of the model with which it runs; None: with none."""
    max_cached_tokens: int | None = None
    """How many prompt tokens' KV a shard may take from its cache: the others are computed for their log-probabilities.
    None: all."""
    answer_id: str = ""
    """Tells the requests of clients outside the fabric apart, which choose their ids themselves
    (kvloom_common/tenancy/usage_record.py); "": the id does. A continuation has that of what it continues."""
    num_ended_tokens: int = 0
    """Output tokens of other choices of the answer: they had ended when it was submitted here, to be continued."""
    num_foreign_tokens: int = 0
    """The number of those tokens of the choices that another request has generated with another model."""
    num_claimed_tokens: int = 0
    """Those that the choices have, if only a client outside the fabric says that they were generated here. They are
    computed as the prompt is, and count as a part of it: nothing else follows from them."""
    most_cached_tokens: int | None = None
    """How many prompt tokens at most count as cached, whatever the shard says: for the others were computed where the
    answer began. None: all."""
    num_ended_reasoning_tokens: int = 0
    """The part of `num_ended_tokens` that is reasoning."""
    issue_ticket: Callable[[int], bytes] | None = None
    """Seals the ticket with which its client can continue the answer at another router
    (router/continuation_tickets.py), given the number of cached tokens; called with its first token. None: the client
    needs none."""
    count_reasoning: Callable[[Sequence[int]], int] | None = None
    """How many of a choice's output tokens are reasoning: a pure function, called when the choice ends. None: usage is
    not metered, or the model writes none."""
    call_reader: Callable[[ChoiceSpec], CallReader] | None = None
    """Makes what finds the calls in a choice whose answer is gated. None: they are not told from text."""
    is_cacheable: bool = False
    """True when its answer may come from the result cache and enter it, as far as the request itself says."""
    wants_receipt: bool = False
    discards_blocks: bool = False
    """True keeps none of the blocks that it computes; it uses those of its cache salt."""
    has_fallback_model: bool = False
    """True when its client has another model for it, so that this one may refuse it in a brownout."""
    objectives: Objectives | None = None
    """The speed that its caller expects; None: none."""
    degradation: Degradation | None = None
    """How its answer is degraded. The core sets this when it admits the request; None: it is not."""

    @property
    def full_name(self) -> str:
        """The name of the model, with that of the adapter if there is one."""
        return full_name(self.model, self.adapter.name) if self.adapter is not None else self.model

    @property
    def has_output(self) -> bool:
        """True when one of its choices has output already, as its client says."""
        return any(choice.output_token_ids for choice in self.choices)

    @property
    def is_continued(self) -> bool:
        """True when another router, edge or model has begun its answer, and a process of the fabric says so, or has
        given its client a ticket (router/continuation_tickets.py)."""
        return (self.num_ended_tokens > 0 or self.has_output) and not self.num_claimed_tokens

    @property
    def num_earlier_tokens(self) -> int:
        """Output tokens of this answer that earlier routers have delivered."""
        num_given = sum(len(choice.output_token_ids) for choice in self.choices)
        return num_given + self.num_ended_tokens - self.num_foreign_tokens - self.num_claimed_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens that count as its prompt, for limits and usage records."""
        return len(self.prompt_token_ids) + self.num_claimed_tokens


def class_of(request: Request) -> PriorityClass:
    return request.priority_class or CLASS_OF_TIER[request.tier]


class ShardAdapter(msgspec.Struct, frozen=True):
    """An adapter that a shard has; see AdapterState in shard_service.proto."""

    name: str
    checksum: str
    loaded: bool = False
    rank: int = 0


class AdaptersReported(msgspec.Struct, frozen=True):
    """All adapters that a shard has; see AdapterList in shard_service.proto."""

    shard_id: str
    adapters: Sequence[ShardAdapter]
    load_seconds: float = 0.0
    """How long loading one usually takes; 0: not known yet."""


class ShardDescription(msgspec.Struct, frozen=True):
    shard_id: str
    incarnation_id: str
    """Differs for every start of the process, so that frames of an earlier incarnation are never mixed in."""
    model: str
    block_size: int
    num_blocks: int
    max_batch: int
    max_model_len: int
    capabilities: frozenset[str] = frozenset()
    variant: str = ""
    """See ShardInfo in shard_service.proto, as for the fields that follow."""
    model_version: str = ""
    model_checksum: str = ""
    card_checksum: str = ""
    embedding_size: int = 0
    image_tokens: tuple[int, int] | None = None
    """The pixels of a patch, and the most tokens of an image; None: the shard sees no images."""
    engine: str = ""
    role: str = ""
    yield_tokens: int = 0
    reserves_output: bool = False


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
    """True when the shard drains and its running sequences are to continue elsewhere."""
    withdrawn: bool = False
    """True when its model is to end: see ShardService.Withdraw."""
    asleep: bool = False
    """True when it sleeps, or is about to: see ShardService.Sleep."""
    empty_within_seconds: float | None = None
    """While it drains and has to be empty soon, the time that is left."""
    num_own_running: int = 0
    """The part of `num_running` that came over this router's stream; the others belong to other routers."""
    num_own_waiting: int = 0
    num_own_queued_prefill_tokens: int = 0
    num_own_decode_context_tokens: int = 0
    num_prompt_tokens: int = 0
    """This, and the next two, since the start of its process, for observers."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


# -- clients ----------------------------------------------------------------------------------------------------------


class CachedChoice(msgspec.Struct, frozen=True):
    """One choice of an answer that the result cache has."""

    token_ids: Sequence[int]
    deltas: Sequence[str]
    """The text of each token; the last one includes what the end of the answer has released."""
    finish: Finish
    """Its slot is not used."""


class RequestArrived(msgspec.Struct, frozen=True):
    request: Request
    ticket: object = None
    """Not None: the answer is reported by AnswerCompleted, with this. Not read by the core."""
    result_cache: ResultCacheUse.ValueType = RESULT_CACHE_USE_UNSPECIFIED
    cached: Sequence[CachedChoice] = ()
    """The answer, if the result cache has it: one entry for each choice of the request."""


class SlotsCancelled(msgspec.Struct, frozen=True):
    """A client cancels some of its sequences. Slots that are not in use are ignored, since their end is already on its
    way."""

    client_id: str
    slots: Sequence[int]


class RequestCancelled(msgspec.Struct, frozen=True):
    """Cancel a request by its name, from any client. `RouterCore.has_request` tells whether it is live."""

    request_id: str
    client_id: str = ""
    """Cancel only if the request came over this client stream; "": over any."""


class ClientGone(msgspec.Struct, frozen=True):
    """A client's stream broke: all its requests are cancelled, and nothing more is sent to it."""

    client_id: str


# -- shards -----------------------------------------------------------------------------------------------------------


class ShardUp(msgspec.Struct, frozen=True):
    """The stream to a shard is connected. A snapshot follows."""

    shard: ShardDescription


class ShardDown(msgspec.Struct, frozen=True):
    """The stream to a shard broke: its running sequences are lost."""

    shard_id: str


class StepArrived(msgspec.Struct):
    shard_id: str
    step: Step


class KvChange(msgspec.Struct):
    """Blocks stored (neighbours, or a few of different sequences), blocks removed, or (`cleared`) all blocks gone."""

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
    """Everything that a shard has sent at once: its parts take effect in order, at one time."""

    shard_id: str
    parts: Sequence[KvSnapshotArrived | KvEventsArrived | LoadReported | AdaptersReported | StepArrived]


class TokensOnlyFrame(msgspec.Struct):
    """A FrameArrived of which everything but the tokens may be handled later: no sequence starts or ends, each has one
    token and no logprobs, no batch of KV events before its own is missing, and the shard is not draining."""

    shard_id: str
    step: Step
    read_rest: Callable[[], Sequence[KvEventsArrived | LoadReported]]
    """Returns the frame's KV events and load reports, in order. Called once."""


# -- safety -----------------------------------------------------------------------------------------------------------


class TextFilter(Protocol):
    """Finds text in which something forbidden by the policy may begin. It is exact in one direction: text that is not
    suspicious is clear."""

    def is_suspicious(self, text: str) -> bool:
        """`text` may be several deltas joined by NUL characters."""
        ...


class SafetyUp(msgspec.Struct, frozen=True):
    """The stream to the safety service is connected, or its policy changed."""

    screens_prompts: bool
    screens_answers: bool
    prefilter: TextFilter | None = None
    """Text that it clears need not be screened; None: all text is screened."""
    prompt_filter: TextFilter | None = None
    """Prompts that it clears would be allowed; None: all prompts are checked."""


class SafetyDown(msgspec.Struct, frozen=True):
    """The stream broke: open checks and screenings get no verdict."""


class PromptVerdict(msgspec.Struct, frozen=True):
    check_id: int
    allowed: bool
    message: str = ""
    rule_failed: bool = False
    """A rule could not be applied: it is not known whether the prompt is allowed."""
    fails_closed: bool = False
    """With `rule_failed`: nothing is shown, whatever holds without a safety service."""
    rules: Sequence[str] = ()
    """For a request with guardrails: all rules that hold for it."""
    unknown_guardrail: str = ""
    """Not empty: the request may not name this one."""


class AnswerHalt(msgspec.Struct, frozen=True):
    slot: int
    num_clear_chars: int
    message: str
    rule_failed: bool = False
    fails_closed: bool = False
    """A rule could not be applied: it is not known whether the rest is allowed."""


class AnswersScreened(msgspec.Struct, frozen=True):
    """See ScreenResponse in safety_service.proto. `slots` are screening slots."""

    slots: Sequence[int]
    num_clear_chars: Sequence[int]
    halts: Sequence[AnswerHalt] = ()
    closed_slots: Sequence[int] = ()
    flagged_slots: Sequence[int] = ()


# -- time -------------------------------------------------------------------------------------------------------------


class LeasesGranted(msgspec.Struct, frozen=True):
    """The answer to leases that were wanted (see `LeasesWanted`)."""

    grants: Sequence[LeaseGrant] = ()
    failed: Sequence[LeaseName] = ()
    """Those whose owner could not be asked."""
    num_routers: int = 1
    """How many routers shared the limits when that was last known."""


class SideCallArrived(msgspec.Struct, frozen=True):
    """A call without an answer wants to be charged to limits; it is decided by a SideCallDecided with its id."""

    call_id: int
    tenant: str
    key_id: str
    num_tokens: int
    """The number of tokens that it is expected to read."""


class SideCallSettled(msgspec.Struct, frozen=True):
    """A call without an answer has read so many tokens more than it was charged for; below 0: fewer."""

    tenant: str
    key_id: str
    num_more_tokens: int


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: expire deadlines, and retry waiting requests."""


class DrainStarted(msgspec.Struct, frozen=True):
    """The router is stopping: new requests are refused, and running ones continue."""


class DrainEnded(msgspec.Struct, frozen=True):
    """The router stops waiting: requests that still run end as DRAINING, so that their clients take them to another
    router."""


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
    | AdaptersReported
    | FrameArrived
    | TokensOnlyFrame
    | SafetyUp
    | SafetyDown
    | PromptVerdict
    | AnswersScreened
    | LeasesGranted
    | SideCallArrived
    | SideCallSettled
    | Tick
    | DrainStarted
    | DrainEnded
)
