"""The core's state of clients and live requests: request → choices, and the attempts that run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    RESULT_CACHE_USE_UNSPECIFIED,
    FinishReason,
    ResultCacheUse,
)
from kvloom_common.text.block_hash import block_hashes, root_hash
from router.core.events import CachedChoice, ChoiceSpec, Request, ShardDescription, TextFilter, TierRank, class_of
from router.core.frames import Finish, Step
from router.core.load.load_view import ReservationKey
from router.core.load.prediction import PlacementPrediction
from router.core.objectives import LiveObjectives
from router.core.priority_classes import INTERACTIVE, PriorityClass
from router.core.request_end import NO_MOVES, RelocationCounts
from router.core.request_usage import UsageMeter
from router.core.tenancy.request_charge import RequestCharge
from router.core.uncleared_output import UnclearedOutput

_INTERACTIVE_TIER: Final = TierRank.INTERACTIVE
"""Looking up the member of an enumeration takes calls, which every request would pay."""
_SEVERITY: Final[dict[int, int]] = {
    FINISH_REASON_STOP: 0,
    FINISH_REASON_LENGTH: 1,
    FINISH_REASON_CANCELLED: 2,
    FINISH_REASON_CONTENT_FILTER: 3,
    FINISH_REASON_ERROR: 4,
}


class QueueId(NamedTuple):
    """A queue in which requests wait in the router."""

    model: str
    shard_id: str = ""
    """"" = the queue of the model: no shard had room."""
    parked_class: str = ""
    """Not "": this is the queue of that class of requests that are not placed while more urgent ones wait."""

    @property
    def is_parked(self) -> bool:
        return bool(self.parked_class)


class StreamClient:
    """One client stream."""

    __slots__ = ("choices", "client_id", "step")

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.choices: dict[int, Choice] = {}
        """Choices by the client's slot; an entry is removed once the choice's finish was sent."""
        self.step: Step | None = None
        """The client's part of the event that is being handled."""


class Attempt:
    """One dispatch to one shard. Its reservation lasts until the shard has ended all its sequences, or is gone."""

    __slots__ = (
        "attempt_id",
        "dispatch_number",
        "num_open_slots",
        "prepares",
        "request_id",
        "sent_at",
        "shard_id",
        "tenant",
    )

    def __init__(
        self,
        request_id: str,
        attempt_id: int,
        dispatch_number: int,
        shard_id: str,
        num_open_slots: int,
        sent_at: float,
        tenant: str | None,
    ) -> None:
        self.request_id = request_id
        self.attempt_id = attempt_id
        self.dispatch_number = dispatch_number
        """The number of this dispatch among all of this router. A name may be reused while the cancelled attempt of an
        earlier request has not been ended by its shard; the attempts of both have the number 1."""
        self.shard_id = shard_id
        self.num_open_slots = num_open_slots
        self.sent_at = sent_at
        self.tenant = tenant
        """None: a request of the router itself."""
        self.prepares: LiveRequest | None = None
        """The request whose prompt it computes in part, or as a leg, or whose KV it fetches."""

    @property
    def key(self) -> ReservationKey:
        return (self.request_id, self.dispatch_number)


class PrefillHandoff:
    """A request whose prompt one shard computes and whose answer another one gives (dispatch/prefill_handoffs.py): the
    state of its leg, and then the hand-off. It is kept until the request ends."""

    __slots__ = (
        "attempt",
        "handoff",
        "is_counted",
        "is_used",
        "leg_expires_at",
        "num_cached_tokens",
        "num_legs",
        "prefill_shard",
        "slot",
    )

    def __init__(self) -> None:
        self.attempt: Attempt | None = None
        """The leg for whose end the request waits."""
        self.slot = 0
        """Its slot on the prefill shard."""
        self.leg_expires_at = 0.0
        self.prefill_shard: ShardDescription | None = None
        """The shard of the last leg."""
        self.num_legs = 0
        self.num_cached_tokens = 0
        """The number of the prompt's tokens that the prefill shard found in its cache."""
        self.handoff = b""
        """Not empty: KV waits to be fetched with it."""
        self.is_used = False
        """True when the last attempt was sent with the hand-off."""
        self.is_counted = False
        """True when the outcome of the last leg has been counted."""

    @property
    def prefill_shard_id(self) -> str:
        return "" if self.prefill_shard is None else self.prefill_shard.shard_id

    def begin_leg(self, attempt: Attempt, slot: int, shard: ShardDescription, expires_at: float) -> None:
        self.attempt, self.slot, self.prefill_shard, self.leg_expires_at = attempt, slot, shard, expires_at
        self.num_cached_tokens = 0
        self.is_counted = False

    def end_leg(self) -> None:
        self.attempt = None

    def take_back(self, handoff: bytes) -> None:
        """The shard of the last attempt has refused it, and not used the hand-off."""
        self.handoff, self.is_used = handoff, False

    def take_handoff(self, *, is_usable: bool) -> bytes:
        """The hand-off for an attempt that is sent now; it can be used once, unless it comes back unused."""
        handoff, self.handoff = self.handoff, b""
        self.is_used = is_usable and bool(handoff)
        return handoff if is_usable else b""


class Choice(msgspec.Struct, eq=False):
    """One requested choice, from admission to the finish that the client gets."""

    request: LiveRequest
    client: StreamClient
    spec: ChoiceSpec
    """The choice as its client has asked for it."""
    client_slot: int = 0
    index: int = 0
    output_token_ids: list[int] = []
    """The client's own tokens, then all that shards have emitted (delivered or withheld)."""
    num_resumed_tokens: int = 0
    """The number of tokens that the client already had when it sent the request; they are not metered again."""
    num_counted_tokens: int = 0
    """The number of tokens that count as the tenant's service already."""
    num_resumed_chars: int = 0
    max_tokens: int | None = None
    """The limit of its last attempt: the requested one, or the rest of that shard's window."""
    num_chars: int = 0
    """Characters of text that shards have emitted, delivered or withheld."""
    num_attempts: int = 0
    num_strikes: int = 0
    """Shards that were lost or failed with it, before it had any output."""
    num_moves: int = 0
    """Attempts that ended through no fault of the choice: it was moved, or its shard handed it over."""
    num_cached_tokens: int | None = None
    """Cached tokens of the first attempt that started."""
    is_done: bool = False
    shard_id: str = ""
    """The shard that runs it; "" while none does."""
    shard_slot: int = 0
    withheld: UnclearedOutput | None = None
    is_screened: bool = False
    screening_slot: int | None = None
    """None until there is text to screen."""
    prefilter: TextFilter | None = None
    """The prefilter of the policy in force when its text was first sent to be screened; None before."""
    num_skipped_chars: int = 0
    """Text that was cleared here and that the safety service has not been notified of."""
    last_skipped_char: str = ""

    def __post_init__(self) -> None:
        spec = self.spec
        self.client_slot, self.index = spec.slot, spec.index
        if spec.output_token_ids:
            self.output_token_ids = list(spec.output_token_ids)
            self.num_resumed_tokens = self.num_counted_tokens = len(self.output_token_ids)
            self.num_resumed_chars = spec.num_delivered_chars

    @property
    def is_at_limit(self) -> bool:
        """True when it has all the tokens that it may have. An embedding has none, and ends with its vector."""
        return bool(self.max_tokens) and len(self.output_token_ids) >= (self.max_tokens or 0)

    def record_forwarded(self, token_ids: Sequence[int], text: str) -> None:
        """Record tokens that the fast path has sent to the client: their text, if it is screened, was cleared here."""
        self.output_token_ids.extend(token_ids)
        if text:
            self.num_chars += len(text)
            withheld = self.withheld
            if withheld is not None:
                withheld.num_clear_chars = self.num_chars
                withheld.last_shown_char = self.last_skipped_char = text[-1]
                self.num_skipped_chars += len(text)


class LiveRequest(msgspec.Struct, eq=False):
    """A request that was admitted and has not ended."""

    request: Request
    client: StreamClient
    arrived_at: float
    priority_class: PriorityClass = INTERACTIVE
    choices: list[Choice] = []
    num_open_choices: int = 0
    pending: list[Choice] = []
    """Choices that are to be dispatched."""
    objectives: LiveObjectives | None = None
    """The objectives that its caller has given; None: it has none."""
    deadline: float = 0.0
    queue_deadline: float = 0.0
    queue_id: QueueId | None = None
    """The queue in which it waits; None while it does not wait."""
    own_seconds: float = 0.0
    """Prefill time on the shard for which it waits."""
    placed_at: float = 0.0
    """When it entered that shard's queue."""
    prediction: PlacementPrediction | None = None
    """The prediction of its first placement; None: it has not been placed."""
    prefill_chunk: tuple[Attempt, int] | None = None
    """The chunk of its prompt that the shard it waits for is computing, and that chunk's slot there."""
    num_prefill_chunks: int = 0
    num_ready_tokens: int = 0
    """How far into the prompt the chunks on that shard reach."""
    num_prepared_tokens: int = 0
    """Prompt tokens that chunks have computed; they are not reported to the client as cached."""
    avoid_shard_id: str = ""
    """The shard on which it has just failed."""
    failure: KvloomError | None = None
    """The reason why it waits for another shard."""
    unschedulable_at: float | None = None
    """When it will have waited long enough for a shard that does not exist; None: such a shard exists."""
    hashes: dict[int, Sequence[int]] = {}
    """Block size → hashes of the prompt's blocks; kept only while the request waits."""
    max_uncleared_tokens: int = 0
    """The limit of withheld tokens per choice."""
    num_attempts: int = 0
    last_shard_id: str = ""
    is_displaced: bool = False
    """True when it was last preempted for a more urgent class."""
    left_at: float | None = None
    """When a sequence had to leave its shard and began to wait for another one; None: none waits for that reason."""
    variant: str = ""
    """That of the last shard; see ShardInfo.variant in shard_service.proto."""
    first_dispatched_at: float | None = None
    first_sent_at: float | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    is_admitted: bool = False
    moves: RelocationCounts = NO_MOVES
    prompt_verdict_open: bool = False
    check_id: int = 0
    charge: RequestCharge | None = None
    """The charge to its limits; None: it has none."""
    usage: UsageMeter | None = None
    """None where no usage records are made."""
    ended_with: tuple[FinishReason.ValueType, KvloomError | None] = (FINISH_REASON_STOP, None)
    """The most severe end among its choices."""
    result_cache: ResultCacheUse.ValueType = RESULT_CACHE_USE_UNSPECIFIED
    safety_rules: str = ""
    """For a request with guardrails: the rules that hold for it, once that is known."""
    kept_ends: list[tuple[Choice, Finish]] | None = None
    """The choices that have ended, if the whole answer is to be reported; None: it is not."""
    split: PrefillHandoff | None = None
    """None: its prompt is computed where its answer is."""
    ticket: object = None
    cached: Sequence[CachedChoice] = ()
    """Its whole answer, if the result cache has it."""
    is_exact: bool = True
    """True while its tokens are those of an answer that was neither moved nor cut short."""
    is_flagged: bool = False
    """True when the safety policy has found something in its answer."""
    is_screened: bool = True
    """True when all of it is screened, as far as the policy wants it, before its end is sent."""

    def __post_init__(self) -> None:
        request = self.request
        if request.priority_class is not None or request.tier is not _INTERACTIVE_TIER:
            self.priority_class = class_of(request)
        self.choices = [Choice(self, self.client, spec) for spec in request.choices]
        self.num_open_choices = len(self.choices)
        self.pending = self.choices[:]
        if request.objectives is not None:
            self.objectives = LiveObjectives(request.objectives, self.arrived_at, is_continued=request.is_continued)

    def capped(self, max_tokens: float) -> float:
        """Returns what the limits of its caller and the brownout of its model leave of this many output tokens of a
        choice."""
        if self.charge is not None and self.charge.max_tokens is not None:
            max_tokens = min(max_tokens, self.charge.max_tokens)
        degradation = self.request.degradation
        if degradation is not None and degradation.max_tokens is not None:
            max_tokens = min(max_tokens, degradation.max_tokens)
        return max_tokens

    @property
    def continues_answer(self) -> bool:
        """True when it waits for a shard that continues what another one has computed."""
        return self.num_attempts > 0 and any(choice.output_token_ids for choice in self.pending)

    def rank(self, now: float) -> int:
        """Its urgency: the lower, the sooner. The client of an answer that has begun reads it, so that the answer is as
        urgent as any, unless its place was taken for a more urgent class. It may be below every class's."""
        if self.num_attempts and not self.is_displaced:
            return 0
        return self.priority_class.rank_after(now - self.arrived_at)

    def note_end(self, reason: FinishReason.ValueType, error: KvloomError | None) -> None:
        if _SEVERITY.get(reason, 0) >= _SEVERITY.get(self.ended_with[0], 0):
            self.ended_with = (reason, error)

    @property
    def has_prefill(self) -> bool:
        """True when a part of its prompt has been computed, or all of it on another shard. This does not change while
        it waits."""
        return self.num_prefill_chunks > 0 or self.split is not None

    @property
    def is_held(self) -> bool:
        """True when it waits for a lease of a limit, before anything else is done for it."""
        return self.charge is not None and not self.charge.is_admitted

    @property
    def has_leg(self) -> bool:
        """True when it waits for another shard to compute its prompt."""
        return self.split is not None and self.split.attempt is not None

    @property
    def handoff(self) -> bytes:
        """Not empty: its prompt has been computed, and its KV waits to be fetched."""
        return b"" if self.split is None else self.split.handoff

    @property
    def is_queued(self) -> bool:
        return self.queue_id is not None

    @property
    def num_context_tokens(self) -> int:
        """Prompt and longest answer so far: the tokens that the next attempt prefills."""
        num_tokens = len(self.request.prompt_token_ids)
        pending = self.pending
        if len(pending) == 1:
            return num_tokens + len(pending[0].output_token_ids)
        return num_tokens + max((len(choice.output_token_ids) for choice in pending), default=0)

    def prompt_hashes(self, block_size: int) -> Sequence[int]:
        """Returns the hashes of the full blocks of its prompt, for shards with blocks of that many tokens."""
        hashes = self.hashes.get(block_size)
        if hashes is None and self.request.block_hashes is not None:
            hashes = self.request.block_hashes.get(block_size)
        if hashes is None:
            adapter, salt = self.request.adapter, self.request.cache_salt
            root = root_hash(self.request.model, "" if adapter is None else adapter.checksum, salt)
            hashes = block_hashes(self.request.prompt_token_ids, block_size, root)
            self.hashes[block_size] = hashes
        return hashes

    @property
    def max_cached_tokens(self) -> int | None:
        """How many tokens' KV the next attempt may take from a cache; None: all. The log-probabilities of the prompt
        came with the first token, if there was one."""
        limit = self.request.max_cached_tokens
        return None if limit is None or any(choice.output_token_ids for choice in self.pending) else limit

    @property
    def min_window(self) -> int:
        """The window that a shard needs to run it."""
        request = self.request
        if request.max_tokens is not None:
            return len(request.prompt_token_ids) + request.max_tokens
        return self.num_context_tokens + 1
