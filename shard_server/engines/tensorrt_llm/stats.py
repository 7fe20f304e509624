"""The engine's load: our own counts of in-flight sequences, combined with TensorRT-LLM's iteration statistics.

Statistics stop when the engine is idle, arrive late, and may be missing altogether. The counts of sequences are
therefore our own, and statistics provide only blocks and speeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from shard_server.engines.base import EngineLoad, LoadShare
from shard_server.engines.tensorrt_llm.requests.request_stream import RequestStream

SMOOTHING: Final = 0.1


class IterationStats:
    """The latest statistics. All records must be absorbed: the library's queue grows while it is unread.

    With attention data parallelism, newer versions give one record per rank and iteration. Blocks and counts are the
    rank's, and are summed; the time and the counts of speculation are the first rank's in all of them, and taken once.
    """

    def __init__(self) -> None:
        self.num_records = 0
        """The number of records: iterations are progress even while no token arrives."""
        self.tokens_per_block: int | None = None
        self.num_preemptions = 0
        self.prefill_tokens_per_second = 0.0
        self.decode_step_seconds = 0.0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._num_blocks: dict[int, int] = {}
        self._num_free_blocks: dict[int, int] = {}
        self._num_paused: dict[int, int] = {}
        """All three by rank."""

    @property
    def num_blocks(self) -> int | None:
        return sum(self._num_blocks.values()) or None

    @property
    def num_free_blocks(self) -> int | None:
        """None: nothing was reported since the engine was idle."""
        return sum(self._num_free_blocks.values()) if self._num_free_blocks else None

    def forget_free_blocks(self) -> None:
        self._num_free_blocks.clear()

    def absorb_capacity(self, capacity: Mapping[str, Any], num_ranks: int) -> None:
        """Takes what get_kv_cache_capacity says of each rank. Does nothing if it is empty."""
        self.tokens_per_block = capacity.get("tokensPerBlock") or self.tokens_per_block
        num_blocks: int = capacity.get("maxNumBlocks") or 0
        if num_blocks:
            self._num_blocks = dict.fromkeys(range(num_ranks), num_blocks)

    def absorb(self, records: Iterable[Mapping[str, Any]]) -> None:
        """The records of one iteration must come together, as the library gives them."""
        for _, rows in itertools.groupby(records, key=lambda record: record.get("iter")):
            self._absorb_iteration(list(rows))

    def _absorb_iteration(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.num_records += len(rows)
        num_context_tokens = num_generating = 0
        for row in rows:
            rank = row.get("attentionDpRank") or 0
            self._absorb_blocks(rank, row.get("kvCacheStats") or {})
            batch = row.get("inflightBatchingStats") or {}
            num_paused = batch.get("numPausedRequests") or 0
            self.num_preemptions += max(0, num_paused - self._num_paused.get(rank, 0))
            self._num_paused[rank] = num_paused
            num_context_tokens += batch.get("numCtxTokens") or 0
            num_generating += batch.get("numGenRequests") or 0
        first = min(rows, key=lambda row: row.get("attentionDpRank") or 0)
        speculation = first.get("specDecodingStats") or {}
        self.num_draft_tokens += speculation.get("numDraftTokens") or 0
        self.num_accepted_tokens += speculation.get("numAcceptedTokens") or 0
        self._absorb_speed((first.get("iterLatencyMS") or 0.0) / 1000, num_context_tokens, num_generating)

    def _absorb_blocks(self, rank: int, blocks: Mapping[str, Any]) -> None:
        if blocks.get("maxNumBlocks"):
            self._num_blocks[rank] = blocks["maxNumBlocks"]
        self.tokens_per_block = blocks.get("tokensPerBlock") or self.tokens_per_block
        if blocks.get("freeNumBlocks") is not None:
            self._num_free_blocks[rank] = blocks["freeNumBlocks"]

    def _absorb_speed(self, seconds: float, num_context_tokens: int, num_generating: int) -> None:
        if seconds <= 0:
            return
        if num_context_tokens:
            rate = num_context_tokens / seconds
            self.prefill_tokens_per_second = _smooth(self.prefill_tokens_per_second, rate)
        elif num_generating:
            self.decode_step_seconds = _smooth(self.decode_step_seconds, seconds)


class InFlight:
    """The sequences between submit and end, in the order of submission. TensorRT-LLM admits them in that order, at most
    `max_batch` at a time."""

    def __init__(self, max_batch: int, num_blocks: int, block_size: int) -> None:
        self.num_submitted = 0
        self._max_batch = max_batch
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._admitted: dict[str, RequestStream] = {}
        self._admitted_at: dict[str, float] = {}
        self._waiting: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._admitted) + len(self._waiting)

    def add(self, stream: RequestStream, now: float) -> None:
        self.num_submitted += 1
        self._waiting[stream.request.request_id] = stream
        self._admit(now)

    def remove(self, request_id: str, now: float) -> None:
        self._waiting.pop(request_id, None)
        self._admitted.pop(request_id, None)
        self._admitted_at.pop(request_id, None)
        self._admit(now)

    def is_admitted(self, request_id: str) -> bool:
        """Returns True when TensorRT-LLM should have admitted the sequence, which may still wait for blocks."""
        return request_id in self._admitted

    def admitted_at(self, request_id: str, now: float) -> float:
        """When the sequence was admitted; `now` if that is unknown."""
        return self._admitted_at.get(request_id, now)

    def load(self, stats: IterationStats, lost_reports: tuple[str, ...] = ()) -> EngineLoad:
        shares: dict[int, LoadShare] = {}
        for stream in self._waiting.values():
            share = shares.setdefault(stream.request.origin, LoadShare())
            share.num_waiting += 1
            share.num_queued_prefill_tokens += stream.request.num_expected_prefill_tokens
        num_used_blocks = most_blocks = 0
        for stream in self._admitted.values():
            share = shares.setdefault(stream.request.origin, LoadShare())
            share.num_running += 1
            if stream.num_tokens:
                share.num_decode_context_tokens += stream.num_context_tokens
            else:
                share.num_queued_prefill_tokens += stream.num_context_tokens
            num_blocks = -(-stream.num_context_tokens // self._block_size)
            num_used_blocks += num_blocks
            most_blocks = max(most_blocks, num_blocks)
        return EngineLoad.of(
            shares,
            num_submitted=self.num_submitted,
            num_available_blocks=self._num_available_blocks(stats, num_used_blocks, most_blocks),
            num_preemptions=stats.num_preemptions,
            prefill_tokens_per_second=stats.prefill_tokens_per_second,
            decode_step_seconds=stats.decode_step_seconds,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            lost_reports=lost_reports,
        )

    def _num_available_blocks(self, stats: IterationStats, num_used_blocks: int, most_blocks: int) -> int:
        """The reported number accounts for shared blocks but is late, so it is capped by what the longest sequence
        leaves."""
        if not len(self):
            stats.forget_free_blocks()  # reports that arrive from now on describe the past
            return self._num_blocks
        reported = stats.num_free_blocks
        if reported is None:
            return max(0, self._num_blocks - num_used_blocks)
        return max(0, min(reported, self._num_blocks - most_blocks))

    def _admit(self, now: float) -> None:
        while self._waiting and len(self._admitted) < self._max_batch:
            request_id = next(iter(self._waiting))
            self._admitted[request_id] = self._waiting.pop(request_id)
            self._admitted_at[request_id] = now


def _smooth(average: float, value: float) -> float:
    return value if not average else average + SMOOTHING * (value - average)
