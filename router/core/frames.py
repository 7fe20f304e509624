"""The core's view of one engine step: the struct of arrays of `StepFrame`, without protobuf.

Incoming steps (slots of the shard's stream) and outgoing steps (slots of the client's stream) have the same form.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvloom.errors import KvloomError
from kvloom.limits_state import LimitsState
from kvloom.v1.generation_pb2 import RESULT_CACHE_USE_UNSPECIFIED, FinishReason, ResultCacheUse
from router.core.request_end import NO_MOVES, RelocationCounts


class Start(msgspec.Struct):
    """A sequence's first token is in this step."""

    slot: int
    num_cached_tokens: int
    queue_time_seconds: float = 0.0
    shard_id: str = ""
    """Set by the router."""
    prompt_logprobs: Sequence[object] = ()
    """Opaque to the core."""
    limits: LimitsState | None = None
    """The caller's remaining limits, if it has any. Set by the router."""
    result_cache: ResultCacheUse.ValueType = RESULT_CACHE_USE_UNSPECIFIED
    brownout: str = ""
    """How the answer is degraded; see SequenceStart.brownout in generation.proto. Set by the router."""
    continuation_ticket: bytes = b""
    """See SequenceStart in generation.proto. Set by the router."""
    priority_class: str = ""
    """See SequenceStart.priority_class in generation.proto. Set by the router."""
    safety_rules: str = ""
    """See SequenceStart.safety_rules in generation.proto. Set by the router."""


class Finish(msgspec.Struct):
    """A sequence ended; nothing follows for its slot."""

    slot: int
    reason: FinishReason.ValueType
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    stop_string: str = ""
    error: KvloomError | None = None
    num_predicted_tokens: int = 0
    num_accepted_predicted_tokens: int = 0
    embedding: bytes = b""
    handoff: bytes = b""
    """See SequenceFinish.handoff in generation.proto. Set by shards, and never sent to clients."""
    limited_by: str = ""
    """See SequenceFinish.limited_by in generation.proto."""
    limits: LimitsState | None = None
    """The caller's remaining limits, if no Start had them."""
    result_cache: ResultCacheUse.ValueType = RESULT_CACHE_USE_UNSPECIFIED
    num_reasoning_tokens: int | None = None
    """None: they are not counted. Set by the router."""
    receipt: bytes = b""
    """Set by the shell: see AnswerCompleted."""
    num_retracted_chars: int = 0
    """See SequenceFinish.num_retracted_chars in generation.proto. Set by the router."""
    moves: RelocationCounts = NO_MOVES
    """Those of the request until now. Set by the router."""


class Step(msgspec.Struct):
    """`slots`, `num_tokens` (empty: one each) and `deltas` have one entry per sequence that progressed; the other
    fields are sparse."""

    slots: list[int] = msgspec.field(default_factory=list)
    num_tokens: list[int] = msgspec.field(default_factory=list)
    token_ids: list[int] = msgspec.field(default_factory=list)
    deltas: list[str] = msgspec.field(default_factory=list)
    logprobs: list[tuple[int, object]] = msgspec.field(default_factory=list)
    """(slot, one token's logprobs) in the order of token_ids. The second part is opaque to the core."""
    starts: list[Start] = msgspec.field(default_factory=list)
    finishes: list[Finish] = msgspec.field(default_factory=list)
    has_replay: bool = False
    """True when it has whole answers from the result cache: their slots have an entry for each piece, in order."""

    @property
    def is_plain(self) -> bool:
        """True when the step has one token for each of some sequences, and nothing else."""
        return not (self.starts or self.finishes or self.num_tokens or self.logprobs) and bool(self.slots)

    def __bool__(self) -> bool:
        return bool(self.slots or self.finishes or self.starts)
