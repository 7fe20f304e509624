"""The `Engine` protocol: what the shard server asks of TensorRT-LLM, torch or the simulator.

An engine works on token ids only. Text (detokenising, stop strings) is the shard server's, the same for every engine.
`tests/conformance` holds the suite that every implementation passes.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol


class Capability(enum.StrEnum):
    """What an engine can promise; a router filters on these and a client reads them from ListModels."""

    LOGPROBS = "logprobs"
    PENALTIES = "penalties"
    TOP_K = "top_k"
    SEEDED_RESUME = "seeded_resume"
    """A sequence resumed from prompt + emitted tokens continues with exactly the tokens it would have had."""
    BATCH_INVARIANT = "batch_invariant"
    """Tokens and logprobs do not depend on what else is in the batch, on chunking, reuse or preemption."""
    PREFIX_CACHING = "prefix_caching"
    GUIDED = "guided"
    """`EngineRequest.guide`."""


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine serves; fixed once it has started."""

    engine: str
    model: str
    block_size: int
    """Tokens a KV block holds."""
    num_blocks: int
    max_batch: int
    """Sequences in one step at most."""
    max_model_len: int
    """Prompt + output tokens of one sequence at most."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    capabilities: frozenset[Capability]
    prefill_tokens_per_second: float = 0.0
    decode_step_seconds: float = 0.0
    """As measured before the first request; 0 = not known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; every value resolved and within its range (see kvloom/sampling.py)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    seed: int = 0
    """64 bits. The random number for an output position is a function of (seed, position) only."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both penalties look at output tokens only, as OpenAI's do."""
    num_logprobs: int | None = None
    """None: no logprobs. k: the chosen token's, and those of the k likeliest tokens. They are log-softmax of the raw
    logits: before temperature and penalties."""


class GuideKind(enum.StrEnum):
    """What the text of a guide is."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema, as JSON. `{"type": "object"}` is any object."""
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON array of the texts that are allowed."""
    GRAMMAR = "grammar"
    """A context-free grammar in Lark's syntax."""


@dataclasses.dataclass(frozen=True, slots=True)
class Guide:
    """What the text of an answer must look like. Stop tokens are drawn only where the text is complete."""

    kind: GuideKind
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence."""

    request_id: str
    """Unique among the engine's live sequences."""
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    """Output tokens at most, those of `output_token_ids` included; prompt + max_tokens <= max_model_len."""
    stop_token_ids: frozenset[int] = frozenset()
    """End-of-sequence tokens are in here (unless the client ignores them). The stop token itself is emitted."""
    output_token_ids: Sequence[int] = ()
    """Tokens that earlier attempts emitted: treated as output (penalties, positions, max_tokens), not emitted again."""
    num_expected_cached_tokens: int = 0
    """Whose KV the router believes to lie here. Only for the load that is reported while the sequence waits."""
    root_hash: int = 0
    """Parent hash of the first block (kvloom.text.block_hash.root_hash): separates models and tenants in the cache."""
    guide: Guide | None = None
    """Only where the engine is capable of GUIDED. It goes on behind `output_token_ids`."""
    origin: int = 0
    """Who submitted it: the load is told by origin, too."""

    @property
    def num_expected_prefill_tokens(self) -> int:
        """What its prefill will compute, as far as can be told before it is admitted."""
        num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)
        return max(1, num_tokens - self.num_expected_cached_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    top: Sequence[tuple[int, float]]
    """(token id, logprob) of the likeliest tokens, likeliest first."""


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceStart:
    request_id: str
    num_cached_tokens: int
    """Prompt tokens (and resumed output tokens) whose KV was reused."""
    queue_time_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceEnd:
    request_id: str
    reason: FinishReason
    error: str = ""
    """For the operator; set when reason is ERROR."""
    refusal: str = ""
    """For the client: why its guide cannot be followed. Set when reason is ERROR and no engine could do better."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStored:
    block_hashes: Sequence[int]
    """Chained hashes as in kvloom/text/block_hash.py, parents first."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    pass


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclasses.dataclass(slots=True)
class LoadShare:
    """What the sequences of one origin are to an engine; fields as in EngineLoad."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_prefill_tokens: int = 0
    num_decode_context_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLoad:
    """As of the end of a step."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_prefill_tokens: int = 0
    """Still to be prefilled, of waiting and running sequences; what waits counts in full."""
    num_decode_context_tokens: int = 0
    shares: Mapping[int, LoadShare] = dataclasses.field(default_factory=dict)
    """The counts above by origin; an origin without live sequences is missing."""
    num_submitted: int = 0
    """Sequences taken in, counted from the start: those submitted after them are not in the counts yet."""
    num_available_blocks: int = 0
    num_preemptions: int = 0
    """Counted from the start."""
    prefill_tokens_per_second: float = 0.0
    decode_step_seconds: float = 0.0
    """Moving averages; 0 = not known yet."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Of speculation, counted from the start: tokens drafted, and those of them that were right."""

    @classmethod
    def of(cls, shares: Mapping[int, LoadShare], **others: Any) -> EngineLoad:
        """The counts are the sums of the shares; `others` are the other fields."""
        parts = shares.values()
        return cls(
            num_running=sum(share.num_running for share in parts),
            num_waiting=sum(share.num_waiting for share in parts),
            num_queued_prefill_tokens=sum(share.num_queued_prefill_tokens for share in parts),
            num_decode_context_tokens=sum(share.num_decode_context_tokens for share in parts),
            shares=shares,
            **others,
        )


@dataclasses.dataclass(slots=True)
class StepOutput:
    """What one engine iteration brought. `request_ids`, `token_ids` and (if any sequence asked) `logprobs` are
    parallel: one entry per sequence that has new tokens."""

    request_ids: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    logprobs: dict[str, list[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    """Per request_id that asked for them: one element per new token."""
    starts: list[SequenceStart] = dataclasses.field(default_factory=list)
    """Sequences whose first token is in this output."""
    ends: list[SequenceEnd] = dataclasses.field(default_factory=list)
    """Sequences that ended in this step; their last tokens are in this same output."""
    kv_events: list[KvEvent] = dataclasses.field(default_factory=list)
    """In order. Hashes stored here can be reused by a sequence that is submitted from now on."""
    load: EngineLoad = dataclasses.field(default_factory=EngineLoad)


class EngineError(Exception):
    """The engine cannot serve, or `submit` was given something that it can never run. The message is for the operator
    and names what was wrong."""


class RequestRefusedError(EngineError):
    """`submit` was given something that no engine of this kind and configuration can run; the message is for whoever
    sent the request."""


class Engine(Protocol):
    """One engine in one process, driven from one asyncio loop. All methods are called on that loop; none blocks it."""

    @property
    def info(self) -> EngineInfo:
        """Valid once `start` has returned."""
        ...

    async def start(self) -> None:
        """Load the weights and allocate the KV blocks. Raises EngineError (bad file, too little memory)."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a sequence. Raises EngineError when it can never run (too long, unknown token id, duplicate id)."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a sequence and free its blocks, within two steps; it ends as CANCELLED. Unknown ids are ignored."""
        ...

    def steps(self) -> AsyncIterator[StepOutput]:
        """Outputs in order, one per iteration that brought anything; waits while the engine is idle. One consumer.

        At most a fixed number of outputs wait unread; then the engine pauses. Ends after `close`. Raises EngineError
        when the engine has died: nothing more will come, and every live sequence is lost.
        """
        ...

    async def close(self) -> None:
        """Stop, free everything. Repeatable. Live sequences end without an output."""
        ...
