"""One sequence of the simulated engine."""

from __future__ import annotations

from kvloom_common.text.block_hash import block_hash, block_hashes
from shard_server.engines.base import EngineError, EngineInfo, EngineRequest, TokenLogprobs
from shard_server.engines.eviction_order import KvOwner
from shard_server.engines.queue_order import QueuedRequest
from shard_server.engines.request_check import check_request
from shard_server.engines.sim_tokens import WORD_TOKEN_IDS, sequence_key, token_at

CHOSEN_LOGPROB = -0.5


def handoff_of(request: EngineRequest) -> bytes:
    """The hand-off of the request's prompt. It stands for the KV, of which the simulation has none."""
    prompt = block_hash(request.root_hash, request.prompt_token_ids)
    return b"sim" + prompt.to_bytes(8, "little")


class SimSequence(QueuedRequest):
    """The tokens, and how many of them have (imagined) KV. Raises EngineError for a request that can never run."""

    __slots__ = (
        "_block_size",
        "_hashes",
        "_key",
        "has_foreign_kv",
        "is_decoding",
        "next_decode_step",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_expected_blocks",
        "num_output_tokens",
        "num_private_blocks",
        "num_stored_blocks",
        "owner",
        "scheduled_at",
        "started",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineRequest,
        info: EngineInfo,
        owner: KvOwner,
        now: float,
        adapter_checksum: str = "",
        answer_seed: int = 0,
    ) -> None:
        check_request(request, info)
        if request.handoff is not None and request.handoff != handoff_of(request):
            raise EngineError("the hand-off is that of another prompt")
        super().__init__(request, now)
        self.has_foreign_kv = request.handoff is not None
        """True when the prompt's KV is fetched from another engine instead of computed."""
        self.owner = owner
        """To whom the blocks belong that it uses."""
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_output_tokens = len(request.output_token_ids)
        self.num_computed_tokens = 0
        self.num_stored_blocks = 0
        """The number of leading blocks that are cached under a hash and referenced."""
        self.num_private_blocks = 0
        self.num_cached_tokens = 0
        self.num_expected_blocks = 0
        """The number of blocks that were cached when the queue was last sorted."""
        self.is_decoding = False
        """True when all tokens but the newest are computed."""
        self.next_decode_step = 0
        self.started = False
        self.scheduled_at: float | None = None
        self._key = sequence_key(request.prompt_token_ids, request.sampling.seed, adapter_checksum, answer_seed)
        self._block_size = info.block_size
        self._hashes: list[int] = []

    @property
    def num_blocks(self) -> int:
        return self.num_stored_blocks + self.num_private_blocks

    @property
    def cached_hashes(self) -> list[int]:
        return self._hashes[: self.num_stored_blocks]

    @property
    def last_stored_hash(self) -> int | None:
        return self._hashes[self.num_stored_blocks - 1] if self.num_stored_blocks else None

    @property
    def num_reusable_blocks(self) -> int:
        """The number of blocks that may come from the cache: as in the torch engine's Sequence."""
        request, last = self.request, len(self.token_ids) - 1
        if request.pooling is not None:
            last = 0
        elif request.sampling.num_prompt_logprobs is not None and not self.started:
            last = self._first_logprob - 1
        return last // self._block_size

    @property
    def _first_logprob(self) -> int:
        """The position of the first prompt token whose logprob is reported, if any is."""
        return max(self.request.sampling.prompt_logprobs_start, 1)

    @property
    def queue_time_seconds(self) -> float:
        return (self.scheduled_at or self.submit_time) - self.submit_time

    def known_hashes(self) -> list[int]:
        """The hashes of all full blocks of the current tokens."""
        if not self._hashes:
            self._hashes = block_hashes(self.token_ids, self._block_size, self.request.root_hash)
        return self._hashes

    def admit(self, num_cached_blocks: int, num_private_blocks: int, now: float) -> None:
        self.num_stored_blocks = num_cached_blocks
        self.num_private_blocks = num_private_blocks
        self.num_computed_tokens = num_cached_blocks * self._block_size
        if self.scheduled_at is None:
            self.scheduled_at = now
            self.num_cached_tokens = self.num_computed_tokens

    def preempt(self) -> None:
        """The blocks were taken away: everything must be computed again."""
        self.num_stored_blocks = self.num_private_blocks = self.num_computed_tokens = 0
        self.is_decoding = False
        self.has_foreign_kv = False  # it was fetched once, and is gone from there
        self._hashes.clear()

    def compute(self, num_tokens: int) -> list[int]:
        """Account for `num_tokens` more computed ones; returns the hashes of blocks that are full now."""
        self.num_computed_tokens += num_tokens
        size = self._block_size
        first, full = self.num_stored_blocks, self.num_computed_tokens // size
        if first == full or self.request.discards_blocks:
            return []
        hashes = self._hashes
        while len(hashes) < full:
            parent = hashes[-1] if hashes else self.request.root_hash
            start = len(hashes) * size
            hashes.append(block_hash(parent, self.token_ids[start : start + size]))
        self.num_stored_blocks = full
        self.num_private_blocks -= full - first
        return hashes[first:full]

    def emit(self, token_id: int | None = None) -> int:
        """Append and return the next token: the given one, else the expected one."""
        if token_id is None:
            token_id = token_at(self._key, self.num_output_tokens)
            if self.num_output_tokens < self.request.min_tokens:
                token_id = self._without_stop(token_id)
        self.token_ids.append(token_id)
        self.num_output_tokens += 1
        self.is_decoding = True
        return token_id

    def _without_stop(self, token_id: int) -> int:
        first = WORD_TOKEN_IDS.index(token_id)
        words = (WORD_TOKEN_IDS[(first + i) % len(WORD_TOKEN_IDS)] for i in range(len(WORD_TOKEN_IDS)))
        return next((word for word in words if word not in self.request.stop_token_ids), token_id)

    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Invented logprobs of the right shape, if they were asked for: the token itself, then words."""
        num_top = self.request.sampling.num_prompt_logprobs
        if num_top is None:
            return []
        words = [(word, CHOSEN_LOGPROB - 1 - i) for i, word in enumerate(WORD_TOKEN_IDS[:num_top])]
        tokens = self.request.prompt_token_ids[self._first_logprob :]
        return [TokenLogprobs(CHOSEN_LOGPROB, [(token_id, CHOSEN_LOGPROB), *words][:num_top]) for token_id in tokens]

    @staticmethod
    def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
        """Invented logprobs of the right shape: the chosen token first, then its neighbours in the word list."""
        first = WORD_TOKEN_IDS.index(token_id)
        others = (WORD_TOKEN_IDS[(first + i) % len(WORD_TOKEN_IDS)] for i in range(num_top))
        return TokenLogprobs(CHOSEN_LOGPROB, [(other, CHOSEN_LOGPROB - i) for i, other in enumerate(others)])
