"""A sequence: one request's tokens, its KV blocks and its progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_server.engines.base import EngineRequest, TokenLogprobs
from shard_server.engines.eviction_order import KvOwner
from shard_server.engines.queue_order import QueuedRequest
from shard_server.engines.torch_engine.block_pool import BlockKey, extend_block_keys
from shard_server.engines.torch_engine.sampling.adjustments import LogitAdjustments

if TYPE_CHECKING:
    from shard_server.engines.torch_engine.pooling import PooledPrompt
    from shard_server.engines.torch_engine.sampling.guides import GuideState
    from shard_server.engines.torch_engine.sampling.prediction import PredictedAnswer
    from shard_server.engines.torch_engine.sampling.speculation import PromptLookup


class Sequence(QueuedRequest):
    """Prompt and output tokens in one list; the KV of the first `num_computed_tokens` is computed.

    Prefill, decode, recomputing after a preemption and resuming on another shard are all the same: they compute the
    tokens after `num_computed_tokens`. A token is drawn once all known tokens are computed.
    """

    __slots__ = (
        "adapter",
        "adjustments",
        "block_keys",
        "block_size",
        "block_table",
        "drawn_row",
        "guide",
        "lookup",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_expected_blocks",
        "num_reused_tokens",
        "owner",
        "pooled",
        "predicted",
        "prompt_logprobs",
        "queue_time_seconds",
        "shares_with",
        "started",
        "token_ids",
        "uncacheable",
    )

    def __init__(
        self,
        request: EngineRequest,
        block_size: int,
        owner: KvOwner,
        submit_time: float,
        guide: GuideState | None = None,
        pooled: PooledPrompt | None = None,
        adapter: Any = None,
    ) -> None:
        super().__init__(request, submit_time)
        self.adapter = adapter
        """The weights of its adapter, as the runner has made them; None: the model itself."""
        self.pooled = pooled
        """Pools the prompt's hidden states; None: tokens are wanted, and no embedding."""
        self.owner = owner
        """To whom the blocks belong that it uses."""
        self.guide = guide
        """The sequence's progress in its guide; None if it is unguided."""
        self.lookup: PromptLookup | None = None
        """None until the first draft."""
        self.predicted: PredictedAnswer | None = None
        """None until the first draft, and without a prediction."""
        self.block_size = block_size
        self.queue_time_seconds: float | None = None
        """The time until it was first scheduled; None before that."""
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_computed_tokens = 0
        self.drawn_row: int | None = None
        """The row of logits from which a device draws its next token, which is not in `token_ids` yet but counts, since
        the next step computes it. None: there is no such token, or the sequence ends with it."""
        self.num_reused_tokens = 0
        """Tokens whose KV was found in the cache when it was first scheduled."""
        self.block_table: list[int] = []
        self.block_keys: list[BlockKey] = []
        """The keys of the full blocks of `token_ids`."""
        self.num_cached_blocks = 0
        """The number of blocks at the front of the block table that are in the prefix cache."""
        self.num_expected_blocks = 0
        """The number of blocks that were in the cache when the queue was last sorted."""
        self.uncacheable = False
        """True when its further blocks are not cached: they are not wanted there, or a block hash has collided."""
        self.shares_with: tuple[Sequence, int] | None = None
        """The running sequence that is computing this one's prefix, and how many tokens they have in common."""
        self.started = False
        """True once its first new token has been reported."""
        self.adjustments = LogitAdjustments.of(request)
        """The changes of the logits that its tokens are drawn from; None: nothing is changed."""
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        """Those of the prompt tokens that were asked for, as far as they are known; None: none were."""
        if request.sampling.num_prompt_logprobs is not None:
            self.prompt_logprobs = []
        if pooled is None:
            self.extend_block_keys()

    @property
    def next_prompt_logits(self) -> int | None:
        """The position of the first token after which logits are missing for the logprobs of the prompt; they come from
        computing the tokens, not from the cache. None: none are missing."""
        known = self.prompt_logprobs
        if known is None:
            return None
        position = max(self.request.sampling.prompt_logprobs_start, 1) - 1 + len(known)
        return position if position < len(self.request.prompt_token_ids) - 1 else None

    def num_prompt_logits(self, num_tokens: int) -> int:
        """After how many of the next `num_tokens` uncomputed tokens logits are computed for that: the last ones."""
        position = None if self.prompt_logprobs is None else self.next_prompt_logits
        return 0 if position is None else max(0, self.num_computed_tokens + num_tokens - position)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + (self.drawn_row is not None)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + (self.drawn_row is not None) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Includes the output tokens of earlier attempts."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def is_running(self) -> bool:
        """A sequence holds blocks exactly while it runs."""
        return bool(self.block_table)

    @property
    def num_reusable_blocks(self) -> int:
        """The number of blocks that may come from the cache. The last token is always computed, for its logits, and so
        are those that the prompt's missing logprobs need; for an embedding all are, for their hidden states."""
        if self.pooled is not None:
            return 0
        position = self.next_prompt_logits
        return (len(self.token_ids) - 1 if position is None else position) // self.block_size

    def append(self, token_id: int) -> None:
        """Append a drawn token."""
        self.token_ids.append(token_id)
        if self.adjustments is not None:
            self.adjustments.count(token_id)
        if len(self.token_ids) % self.block_size == 0:
            self.extend_block_keys()

    def extend_block_keys(self) -> None:
        extend_block_keys(self.block_keys, self.token_ids, self.block_size, self.request.root_hash)

    def num_common_tokens(self, other: Sequence) -> int:
        """The number of tokens in the leading full blocks that both sequences share."""
        num_common = 0
        for mine, theirs in zip(self.block_keys, other.block_keys, strict=False):
            if mine != theirs:
                break
            num_common += self.block_size
        return num_common
