"""The `Engine` protocol: what the shard server requires of TensorRT-LLM, torch or the simulator.

To add an engine, implement `Engine` and register it in engines/engine_kinds.py. `tests/conformance` holds the suite
that every implementation must pass (tests/conformance/engine_table.py lists them).

- An engine works on token ids only. Text (detokenising, stop strings) is handled by the shard server, in the same way
  for every engine.
- All times are in seconds, all lengths in tokens. Counters that are "counted from the start" only ever grow.
- One engine serves one model in one process. The shard server makes every call on one asyncio loop. An engine may
  compute in threads of its own, but its methods must not block that loop.
- A sequence passes through `submit`, one SequenceStart, outputs with its tokens, and exactly one SequenceEnd. One that
  asks for an embedding has no tokens: its SequenceStart is in the output with its SequenceEnd, which has the vector.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from kvloom_common.class_rank import INTERACTIVE_RANK
from kvloom_common.kv_share import KvShare


class Capability(enum.StrEnum):
    """Names a thing that an engine can do. Routers place requests by these values, and clients read them from
    ListModels."""

    GENERATE = "generate"
    """Requests without `EngineRequest.pooling`. Engines without EMBED need not list it."""
    EMBED = "embed"
    """`EngineRequest.pooling`."""
    RERANK = "rerank"
    SCORE = "score"
    """Both: the model was trained so that the cosine of two embeddings says how close the texts are in meaning."""
    CROSS_ENCODE = "cross_encode"
    """An engine with EMBED that reads two texts as one prompt, the second behind the first separator: its embedding is
    one number, the logit of how relevant the second text is to the first. It is never scaled."""
    LOGPROBS = "logprobs"
    """`Sampling.num_logprobs`."""
    PENALTIES = "penalties"
    """`Sampling.presence_penalty` and `Sampling.frequency_penalty`."""
    TOP_K = "top_k"
    """`Sampling.top_k`."""
    SEEDED_RESUME = "seeded_resume"
    """A sequence that is resumed from prompt + emitted tokens continues with exactly the tokens it would have had."""
    BATCH_INVARIANT = "batch_invariant"
    """Tokens and logprobs do not depend on the rest of the batch, on chunked prefill, on KV reuse or on preemption."""
    PREFIX_CACHING = "prefix_caching"
    """The engine reuses the KV of earlier sequences and reports its cached blocks as KvEvents."""
    GUIDED = "guided"
    """`EngineRequest.guide`."""
    STRUCTURAL_TAGS = "structural_tags"
    """Guides of the kind STRUCTURAL_TAGS, in an engine with GUIDED."""
    MIN_P = "min_p"
    """`Sampling.min_p`."""
    REPETITION_PENALTY = "repetition_penalty"
    """`Sampling.repetition_penalty`."""
    LOGIT_BIAS = "logit_bias"
    """`Sampling.logit_bias`."""
    MIN_TOKENS = "min_tokens"
    """`EngineRequest.min_tokens`."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """`Sampling.num_prompt_logprobs` and `Sampling.prompt_logprobs_start`."""
    ADAPTERS = "adapters"
    """`EngineRequest.adapter`; the engine is an AdapterEngine."""
    KV_SHARES = "kv_shares"
    """`EngineRequest.kv_share`. Other engines ignore it."""
    PREDICTION = "prediction"
    """`EngineRequest.predicted_token_ids` makes answers faster. Other engines ignore them."""
    KV_HANDOFF = "kv_handoff"
    """`EngineRequest.prefill_only` and `EngineRequest.handoff`."""
    HANDOFF_LOGPROBS = "handoff_logprobs"
    """Hand-offs of an engine with KV_HANDOFF and LOGPROBS have the logprobs of the first token."""
    VISION = "vision"
    """`EngineRequest.images`, with EngineInfo.image_tokens."""
    FAIR_PREFILL = "fair_prefill"
    """`EngineRequest.tenant`: within a class, prefill of the tenant that had least goes first, and that of another
    one gives way to it at the next step (prefill_order.py). Only with EngineInfo.yield_tokens."""


class SequenceFinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    """Its last token is one of `EngineRequest.stop_token_ids`, or its embedding is complete."""
    LENGTH = "length"
    """It has `EngineRequest.max_tokens` output tokens."""
    CANCELLED = "cancelled"
    """`Engine.cancel` was called."""
    ERROR = "error"
    """This sequence failed; the engine itself keeps serving."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineInfo:
    """Describes what the engine serves. It does not change after `Engine.start` has returned."""

    engine: str
    """The engine's name, as in the configuration key `shard.engine`."""
    model: str
    """The served model's name, as in `model.name`."""
    block_size: int
    """The number of tokens in a KV block."""
    num_blocks: int
    """The number of KV blocks that all sequences share."""
    max_batch: int
    """The largest number of sequences in one step."""
    max_model_len: int
    """The largest number of prompt + output tokens of one sequence."""
    vocab_size: int
    """Token ids are 0 <= id < vocab_size."""
    eos_token_ids: frozenset[int]
    """The model's end-of-sequence tokens."""
    capabilities: frozenset[Capability]
    prefill_tokens_per_second: float = 0.0
    decode_step_seconds: float = 0.0
    """Both speeds as measured before the first request; 0 = unknown. `decode_step_seconds` is the time of one step."""
    variant: str = ""
    """Names what the bits of results depend on: engines of one model compute the same only if their variants are equal.
    "" = it promises no bits."""
    description: str = ""
    """Says in one line, for people, what computes and how fast."""
    embedding_size: int = 0
    """The dimensions of an embedding; 0 without Capability.EMBED."""
    yield_tokens: int = 0
    """The largest number of prompt tokens in one step, after which prefill gives way to that of sequences with a lower
    `EngineRequest.class_rank` (queue_order.py). 0 = the engine does not look at ranks."""
    reserves_output: bool = False
    """True when a sequence waits for KV blocks for all tokens that it may generate, not only for its prompt."""
    image_tokens: tuple[int, int] | None = None
    """With Capability.VISION: an image has a token for each patch of so many pixels squared, and at most so many
    tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Every default is filled in and every value within its range (see kvloom/sampling.py)."""

    temperature: float = 1.0
    """0 = always the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = all tokens."""
    seed: int = 0
    """64 bits. The random number for an output position must be a function of (seed, position) only."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both penalties count output tokens only, as OpenAI's do."""
    num_prompt_logprobs: int | None = None
    """The same as num_logprobs, for the tokens of the prompt from `prompt_logprobs_start` on, but never for the first.
    They are in SequenceStart."""
    prompt_logprobs_start: int = 0
    """Less than the number of prompt tokens. KV of the tokens before the one before it may come from the cache."""
    min_p: float = 0.0
    """Only tokens that are at least this fraction as likely as the likeliest, after temperature, are drawn. 0 = all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens in the prompt or the output. Applied
    before the other penalties. 1 = none."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit before penalties and temperature); ids are different and known."""
    num_logprobs: int | None = None
    """None: no logprobs. k: the logprob of the chosen token and those of the k likeliest tokens. Logprobs are the
    log-softmax of the raw logits, before temperature, bias and penalties."""


class GuideKind(enum.StrEnum):
    """The language in which a guide is written."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema, as JSON. `{"type": "object"}` allows any object."""
    REGEX = "regex"
    """A regular expression that the whole text must match."""
    CHOICE = "choice"
    """A JSON array of the allowed texts."""
    GRAMMAR = "grammar"
    """A context-free grammar in Lark's syntax."""
    STRUCTURAL_TAGS = "structural_tags"
    """A JSON object of `tags` (each with `begin`, `json_schema` as text, and `end`) and `triggers`: see StructuralTags
    in protos/kvloom/v1/generation.proto."""


@dataclasses.dataclass(frozen=True, slots=True)
class Guide:
    """A constraint on the text of an answer. Stop tokens may be drawn only where the text is complete."""

    kind: GuideKind
    text: str
    relaxable: tuple[str, ...] = ()
    """The names of a JSON Schema's definitions in place of which any object may be allowed, if the engine cannot follow
    them."""


class PoolingKind(enum.StrEnum):
    """How the hidden states of a prompt's tokens become one vector."""

    MEAN = "mean"
    LAST = "last"
    """That of the last token."""
    CLS = "cls"
    """That of the first token."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pooling:
    """Says how an embedding is made of hidden states after the model's last layer and its norm."""

    kind: PoolingKind | None = None
    """None: as the model was trained, or MEAN if nothing says how it was trained."""
    normalize: bool = True
    """True scales the vector to the length 1."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineImage:
    """An image of a prompt. In the prompt, token ids from 2**31 on stand for it, which follow from its content
    (kvloom_common/text/prompt_images.py): whatever is kept by the prompt's tokens is kept by its images, too."""

    position: int
    """That of its first token in the prompt."""
    num_tokens: int
    media_type: str
    data: bytes
    """The file that the client has sent: its type and its size in pixels were checked, and nothing else."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to generate, or one prompt to embed."""

    request_id: str
    """Unique among the sequences that have not ended."""
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    """The largest number of output tokens, including `output_token_ids`; prompt + max_tokens <= max_model_len. 0 with
    `pooling`, otherwise at least 1."""
    stop_token_ids: frozenset[int] = frozenset()
    """Includes the end-of-sequence tokens unless the client ignores them. The stop token itself is emitted."""
    min_tokens: int = 0
    """No stop token is drawn before the output has this many tokens, unless the guide allows nothing else. At most
    max_tokens."""
    output_token_ids: Sequence[int] = ()
    """Tokens that earlier attempts emitted. They count as output (penalties, positions, max_tokens) but are not emitted
    again."""
    num_expected_cached_tokens: int = 0
    """The tokens whose KV the router expects in the cache. Used only for the reported load while the sequence waits."""
    images: Sequence[EngineImage] = ()
    """In order. Set only for an engine with Capability.VISION."""
    root_hash: int = 0
    """The parent hash of the first block (kvloom_common.text.block_hash.root_hash). It keeps models and tenants apart
    in the cache."""
    guide: Guide | None = None
    """Set only for an engine with Capability.GUIDED. The guide continues after `output_token_ids`, which are part of
    the guided text."""
    predicted_token_ids: Sequence[int] = ()
    """The answer that the client expects. It may be used for drafts, and must not change the answer."""
    pooling: Pooling | None = None
    """Set only for an engine with Capability.EMBED: the prompt is computed, and the sequence ends with its embedding,
    which is the same in every batch if the engine has BATCH_INVARIANT."""
    adapter: str = ""
    """The name of the adapter that computes the sequence. The engine has it, and `root_hash` names it, too. "": the
    model itself. Set only for an engine with Capability.ADAPTERS."""
    discards_blocks: bool = False
    """True keeps the blocks that it computes out of the prefix cache. It may use those that are there. Engines without
    Capability.PROMPT_LOGPROBS need not honour it."""
    kv_share: KvShare | None = None
    """The guaranteed share of the blocks that the sequence's owner has; None: it has none. Only engines with
    Capability.KV_SHARES honour it."""
    no_speculation: bool = False
    """True lets no tokens be drafted for it. Engines that cannot tell sequences apart in this need not honour it."""
    prefill_only: bool = False
    """True ends it with its first token, and its KV waits to be fetched by another engine: see `SequenceEnd.handoff`.
    Set only for an engine with Capability.KV_HANDOFF, and then max_tokens is 1."""
    handoff: bytes | None = None
    """The hand-off of an engine that has computed this prompt: its KV is fetched, and the first token, which belongs to
    the hand-off, is emitted again. None: the prompt is computed here. Set only for an engine with
    Capability.KV_HANDOFF."""
    class_rank: int = INTERACTIVE_RANK
    """How urgent it is: the lower, the more. Engines without EngineInfo.yield_tokens need not honour it."""
    tenant: str = ""
    """The tenant that asked; all requests with "" count as those of one tenant. Engines without Capability.FAIR_PREFILL
    need not honour it."""
    traceparent: str = ""
    """The request's place in a trace, as in W3C Trace Context. Engines that trace nothing need not honour it."""
    origin: int = 0
    """Identifies the stream that submitted the sequence; `EngineLoad.shares` is split by it."""

    @property
    def num_expected_prefill_tokens(self) -> int:
        """The number of tokens that prefill will compute, as estimated before the sequence is admitted."""
        num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)
        return max(1, num_tokens - self.num_expected_cached_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprobs at one output position."""

    logprob: float
    """The chosen token's logprob."""
    top: Sequence[tuple[int, float]]
    """(token id, logprob) of the `num_logprobs` likeliest tokens, likeliest first."""


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceStart:
    """Reported once per sequence, with its first token."""

    request_id: str
    num_cached_tokens: int
    """The prompt tokens (and resumed output tokens) whose KV was reused."""
    queue_time_seconds: float
    """From `submit` to the step in which prefill began."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """One entry for each prompt token that the request asked for; see `Sampling.num_prompt_logprobs`."""


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceEnd:
    """Reported once per sequence; the engine has freed its blocks."""

    request_id: str
    reason: SequenceFinishReason
    error: str = ""
    """A message for the operator; set when reason is ERROR."""
    refusal: str = ""
    """A message for the client: why its guide cannot be applied. Set when reason is ERROR and the request would fail on
    every engine."""
    embedding: bytes = b""
    """The vector, if the request had a `pooling` and reason is STOP: `EngineInfo.embedding_size` little-endian
    float32."""
    handoff: bytes = b""
    """With which another engine of this kind fetches the KV, if the request was `prefill_only` and reason is LENGTH,
    also if it was cancelled when its KV was complete. Empty: nothing waits to be fetched. KV that is not fetched is
    freed after a bounded time."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks are in the prefix cache from now on."""

    block_hashes: Sequence[int]
    """Chained 64-bit hashes as in kvloom_common/text/block_hash.py, parents first."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks were evicted from the prefix cache."""

    block_hashes: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclasses.dataclass(slots=True)
class LoadShare:
    """The load from the sequences of one origin; fields as in EngineLoad."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_prefill_tokens: int = 0
    num_decode_context_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class KvShareUsage:
    """Counts the blocks of all guaranteed shares together."""

    num_kept: int = 0
    """The guaranteed blocks that the owners hold, in use or cached."""
    num_lent: int = 0
    """The guaranteed blocks that the owners do not hold: others may."""
    num_beyond: int = 0
    """The blocks that the owners hold beyond their guarantees."""
    num_protected: int = 0
    """Cached blocks that `EngineLoad.num_available_blocks` leaves out."""
    num_last_resorts: int = 0
    """Protected blocks that were evicted for others, since nothing else was left. Counted from the start."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's load at the end of a step."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued_prefill_tokens: int = 0
    """Tokens that waiting and running sequences have still to prefill. Waiting sequences count in full."""
    num_decode_context_tokens: int = 0
    """Prompt + output tokens of the sequences that are decoding."""
    shares: Mapping[int, LoadShare] = dataclasses.field(default_factory=dict)
    """The counts above by `EngineRequest.origin`. Origins without live sequences are absent."""
    num_submitted: int = 0
    """Submitted sequences that the counts include, counted from the start. Later ones are not in the counts yet."""
    num_available_blocks: int = 0
    """KV blocks that are free or hold only evictable cache entries, without those that a sequence without a share would
    have to wait for because shares protect them."""
    kv_shares: KvShareUsage | None = None
    """None: no sequence has had a share, or the engine has none."""
    num_preemptions: int = 0
    """Counted from the start."""
    prefill_tokens_per_second: float = 0.0
    decode_step_seconds: float = 0.0
    """Moving averages; 0 = unknown so far."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Speculation, counted from the start: drafted tokens, and those of them that were accepted."""
    lost_reports: tuple[str, ...] = ()
    """The reports that a foreign engine has stopped although it works: "statistics" (then the load is an estimate) or
    "kv_events" (then routers see an empty cache)."""

    @classmethod
    def of(cls, shares: Mapping[int, LoadShare], **others: Any) -> EngineLoad:
        """A load whose counts are the sums of the shares. `others` are the other fields."""
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
    """The output of one engine iteration.

    `request_ids` and `token_ids` are parallel: one entry per sequence that has new tokens.
    """

    request_ids: list[str] = dataclasses.field(default_factory=list)
    token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    logprobs: dict[str, list[TokenLogprobs]] = dataclasses.field(default_factory=dict)
    """By request_id, for sequences that requested logprobs: one element per new token."""
    predictions: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """By request_id: how many predicted tokens were drafted in this step, and how many of them were right."""
    starts: list[SequenceStart] = dataclasses.field(default_factory=list)
    """Sequences whose first token is in this output."""
    ends: list[SequenceEnd] = dataclasses.field(default_factory=list)
    """Sequences that ended in this step; their last tokens are in this same output."""
    kv_events: list[KvEvent] = dataclasses.field(default_factory=list)
    """In the order in which they happened. A sequence that is submitted from now on can reuse the stored blocks."""
    load: EngineLoad = dataclasses.field(default_factory=EngineLoad)


class EngineError(Exception):
    """The engine cannot serve, or `submit` was called with a sequence that can never run. The message is for the
    operator and names the cause."""


class RequestRefusedError(EngineError):
    """`submit` was called with a sequence that no engine of this kind and configuration can run. The message is for the
    client that sent the request."""


class AdapterError(Exception):
    """An adapter cannot be registered, loaded or taken away. The message is for the operator and names the cause."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A registered adapter."""

    name: str
    path: str
    checksum: str
    """The SHA-256 of its files, in hexadecimal. Adapters with the same checksum compute the same."""
    rank: int = 0
    """The largest rank of its matrices; 0: not known."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterState:
    info: AdapterInfo
    is_loaded: bool


@dataclasses.dataclass(frozen=True, slots=True)
class AdaptersState:
    """The adapters of an engine at one time."""

    adapters: Sequence[AdapterState]
    """Those that sequences may use, in the order of their registration."""
    max_loaded: int
    load_seconds: float
    """A moving average of how long loads took; 0 = unknown so far."""
    num_loads: int
    num_evictions: int
    """Both counted from the start."""
    running: Sequence[str]
    """The adapters of sequences that run or may run, sorted."""
    waiting: Sequence[str]
    """The adapters that sequences wait for, sorted."""


class Adapters(Protocol):
    """The adapters of one engine. All methods are called on the event loop of the engine, after its start."""

    def state(self) -> AdaptersState: ...

    def find(self, name: str) -> AdapterInfo | None:
        """None if sequences may not use an adapter of this name."""
        ...

    def listen(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` from now on after every change of `state`. There is one listener."""
        ...

    async def add(self, name: str, path: str, *, load_now: bool = False) -> AdapterState:
        """Check an adapter's files, and register it. Its weights are loaded when a sequence first needs them, or now.
        Repeated with the same files, it changes nothing. Raises AdapterError."""
        ...

    async def remove(self, name: str) -> None:
        """Take an adapter away: `find` does not find it any more. Returns when the sequences that use it have ended.
        Raises AdapterError if there is none of this name."""
        ...


class Engine(Protocol):
    """One engine in one process.

    All methods are called on one asyncio loop and none may block it. The order is: `start`; then `submit` and `cancel`
    in any order while one task iterates `steps`; then `close`.
    """

    @property
    def info(self) -> EngineInfo:
        """Describes what the engine serves. Valid after `start` has returned; the same object from then on."""
        ...

    async def start(self) -> None:
        """Load the weights and allocate the KV blocks. Called once.

        Raises EngineError when the engine cannot serve: bad model files, unsupported model, too little memory.
        """
        ...

    def submit(self, request: EngineRequest) -> None:
        """Queue a sequence. Its outputs, and all failures from here on, are reported through `steps`.

        Raises EngineError when the sequence can never run (too long, unknown token id, duplicate request_id), and
        RequestRefusedError when the client has caused that. A sequence for which it raised leaves no trace.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End a sequence and free its blocks within two steps. It ends as CANCELLED unless it ends otherwise first.

        Unknown request_ids and those of ended sequences are ignored.
        """
        ...

    def steps(self) -> AsyncIterator[StepOutput]:
        """Yield the outputs in order, one per iteration that produced something; wait while the engine is idle.

        There is one consumer. The engine holds at most a fixed number of unread outputs (or tokens) and then pauses, so
        that a slow consumer bounds its memory. The iterator ends after `close`. It raises EngineError when the engine
        has died: no more output follows, and every live sequence is lost.
        """
        ...

    async def close(self) -> None:
        """Stop and free everything; may be called repeatedly. Live sequences end without an output."""
        ...


class AdapterEngine(Engine, Protocol):
    """An engine with Capability.ADAPTERS."""

    @property
    def adapters(self) -> Adapters: ...


def adapters_of(engine: Engine) -> Adapters | None:
    """The adapters of an engine that has started; None if it can have none."""
    if Capability.ADAPTERS not in engine.info.capabilities:
        return None
    return cast(AdapterEngine, engine).adapters
