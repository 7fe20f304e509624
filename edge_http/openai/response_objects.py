"""The objects that responses in OpenAI's shape consist of, as /openapi.json describes them.

Responses are not made from these types, but from templates, because that is faster (response_formatters.py). Tests
decode what the edge sends with them, so that the two cannot differ.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Object(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class ErrorObject(Object):
    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str | None
    """The code of the error; docs/reference/http-api.md lists the codes."""


class ErrorBody(Object):
    error: ErrorObject


class PromptTokensDetails(Object):
    cached_tokens: int
    """Prompt tokens whose KV was reused."""


class CompletionTokensDetails(Object):
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class UsageObject(Object):
    prompt_tokens: int
    completion_tokens: int
    """The tokens of all choices together, reasoning included."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class KvloomDetails(Object):
    """The first three with the header x-kvloom-details."""

    shard_id: str | msgspec.UnsetType = msgspec.UNSET
    num_cached_tokens: int | msgspec.UnsetType = msgspec.UNSET
    queue_time_seconds: float | msgspec.UnsetType = msgspec.UNSET
    num_retracted_chars: list[int] | msgspec.UnsetType = msgspec.UNSET
    """For each choice: how many characters at its end the safety policy forbids, which were shown before its
    verdict."""
    receipts: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    """With the header x-kvloom-receipt: one for each prompt."""


class TopLogprob(Object):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Object):
    content: list[TokenLogprob]
    refusal: None


class Function(Object):
    name: str
    arguments: str
    """The arguments, as JSON."""


class ToolCallObject(Object):
    id: str
    type: Literal["function"]
    function: Function


class ChatMessageObject(Object):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    """The model's thoughts before it answered."""
    tool_calls: list[ToolCallObject] | msgspec.UnsetType = msgspec.UNSET
    function_call: Function | msgspec.UnsetType = msgspec.UNSET


FinishReason = Literal["stop", "length", "content_filter", "tool_calls", "function_call"]


class ChatChoice(Object):
    index: int
    message: ChatMessageObject
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class InlineResult(Object):
    """The result of one text."""

    type: Literal["moderation_result"]
    model: str
    """Names the version of the safety policy."""
    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[str]]


class InlineResultsObject(Object):
    """The results of one side, or why there are none."""

    type: Literal["moderation_results", "error"]
    model: str | msgspec.UnsetType = msgspec.UNSET
    results: list[InlineResult] | msgspec.UnsetType = msgspec.UNSET
    code: str | msgspec.UnsetType = msgspec.UNSET
    message: str | msgspec.UnsetType = msgspec.UNSET


class InlineModerationObject(Object):
    """The results of a request that asked for `moderation`."""

    input: InlineResultsObject
    output: InlineResultsObject


class ChatCompletion(Object):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageObject
    moderation: InlineModerationObject | msgspec.UnsetType = msgspec.UNSET
    kvloom: KvloomDetails | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(Object):
    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDeltaObject(Object):
    index: int
    function: FunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(Object):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    refusal: msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDeltaObject] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionDelta | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(Object):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Object):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageObject | msgspec.UnsetType | None = msgspec.UNSET
    """In the last chunk, if stream_options.include_usage asked for it."""
    moderation: InlineModerationObject | msgspec.UnsetType = msgspec.UNSET
    kvloom: KvloomDetails | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobsObject(Object):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Object):
    index: int
    text: str
    logprobs: CompletionLogprobsObject | None
    finish_reason: FinishReason | None


class Completion(Object):
    """The body of an answer, and a chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageObject | msgspec.UnsetType | None = msgspec.UNSET
    kvloom: KvloomDetails | msgspec.UnsetType = msgspec.UNSET


class ModelObject(Object):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None
    """The model that an alias stands for, or MODEL:ADAPTER; otherwise the same as `id`. A route has null."""
    parent: str | None
    """The model of an adapter."""
    version: str | None
    max_model_len: int | None
    """The longest prompt and answer together, in tokens; null while no shard serves the model."""
    capabilities: list[str]
    """The capabilities that all of its shards have."""
    num_ready_shards: int


class ModelList(Object):
    object: Literal["list"]
    data: list[ModelObject]


class ModerationResult(Object):
    flagged: bool
    categories: dict[str, bool]
    """Those of the safety policy, by name."""
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[str]]


class ModerationObject(Object):
    id: str
    model: str
    """Names the version of the safety policy."""
    results: list[ModerationResult]
    """One for each text, in order."""


class EmbeddingUsage(Object):
    prompt_tokens: int
    total_tokens: int


class EmbeddingDetails(Object):
    receipts: list[dict[str, Any]]
    """With the header x-kvloom-receipt: one for each text."""


class EmbeddingObject(Object):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """A string is the base64 of little-endian float32."""


class EmbeddingList(Object):
    object: Literal["list"]
    data: list[EmbeddingObject]
    """In the order of the inputs."""
    model: str
    usage: EmbeddingUsage
    kvloom: EmbeddingDetails | msgspec.UnsetType = msgspec.UNSET


class RankedText(Object):
    text: str


class RankedDocument(Object):
    index: int
    relevance_score: float
    """The cosine similarity of query and document, from -1 to 1."""
    document: RankedText | msgspec.UnsetType = msgspec.UNSET


class Ranking(Object):
    id: str
    object: Literal["list"]
    model: str
    results: list[RankedDocument]
    """The best first."""
    usage: EmbeddingUsage
    kvloom: EmbeddingDetails | msgspec.UnsetType = msgspec.UNSET


class ScoreObject(Object):
    index: int
    object: Literal["score"]
    score: float


class Scores(Object):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    """In the order of the pairs."""
    usage: EmbeddingUsage
    kvloom: EmbeddingDetails | msgspec.UnsetType = msgspec.UNSET


class Response(msgspec.Struct, kw_only=True):
    """The fields that every response of the Responses API has."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    """Messages, reasoning and function calls, in their order."""
    usage: dict[str, Any] | None


class Compaction(msgspec.Struct, kw_only=True):
    """A conversation that was compacted. Its output is the input of what follows."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    """The messages of the user, and an item that stands for the whole conversation."""
    usage: dict[str, Any]


class NamedEvent(msgspec.Struct, kw_only=True):
    """An event of an API whose events have names: the name is also its type."""

    type: str


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks of text, thinking and tool use, in their order."""
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class AnthropicErrorObject(Object):
    type: str
    message: str
    details: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """For clients' own use: that threads are not supported."""


class AnthropicError(Object):
    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | msgspec.UnsetType = msgspec.UNSET


class TokenCount(msgspec.Struct, kw_only=True):
    input_tokens: int


class InputTokens(msgspec.Struct, kw_only=True):
    object: str
    input_tokens: int


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    """0 if no shard has said it yet."""
    tokens: list[int]
    token_strs: list[str] | None


class TokensText(msgspec.Struct, kw_only=True):
    prompt: str


class Cancelled(Object):
    id: str
    cancelled: bool


class UsageSums(Object, kw_only=True):
    """Over requests. Fields by which is not grouped are missing; costs are decimal numbers in units of the currency."""

    day: str | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET
    key: str | msgspec.UnsetType = msgspec.UNSET
    tier: str | msgspec.UnsetType = msgspec.UNSET
    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int
    block_seconds: float
    cost: str


class BudgetOfAccount(Object):
    """A hard budget in its current period. Amounts of the currency are decimal numbers."""

    account: str
    unit: Literal["currency", "tokens"]
    period: str
    limit: int | str
    spent: int | str
    remaining: int | str


class TenantUsageObject(Object):
    object: Literal["usage"]
    tenant: str
    data: list[UsageSums]
    has_more: bool
    budgets: list[BudgetOfAccount]


class Status(Object):
    status: Literal["ok", "ready", "not_ready"]
    reason: str | msgspec.UnsetType = msgspec.UNSET


class Version(Object):
    version: str


class TargetGroup(Object):
    targets: list[str]
    labels: dict[str, str]


class ReceiptKey(Object):
    key_id: str
    public_key: str
    """The key, in hexadecimal."""
    algorithm: Literal["Ed25519"]


class ReceiptKeys(Object):
    keys: list[ReceiptKey]
    """The present one first, then those of earlier times."""


class OpenApiDocument(msgspec.Struct):
    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
