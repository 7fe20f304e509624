"""The names of TensorRT-LLM's objects, events and statistics, of all releases together. The adapter uses no others
(test_names.py), so that a wrong name fails in a test and not on an operator's machine."""

from __future__ import annotations

from typing import Final

OBJECTS: Final[dict[str, frozenset[str]]] = {
    "LLM": frozenset(
        {
            "_check_health",
            "args",
            "generate_async",
            "get_kv_cache_capacity",
            "get_kv_cache_events",
            "get_stats",
            "shutdown",
        }
    ),
    "RequestOutput": frozenset(
        {
            "abort",
            "aborted",
            "aresult",
            "cached_tokens",
            "error",
            "finished",
            "metrics_dict",
            "outputs",
            "prompt_token_ids",
            "request_id",
        }
    ),
    "CompletionOutput": frozenset(
        {
            "cumulative_logprob",
            "disaggregated_params",
            "finish_reason",
            "index",
            "logprobs",
            "request_perf_metrics",
            "stop_reason",
            "text",
            "token_ids",
        }
    ),
    "Logprob": frozenset({"logprob", "rank"}),
}
"""Attributes and methods."""

EVENT_KEYS: Final = frozenset(
    {
        "event_id",
        "window_size",
        "attention_dp_rank",
        "data",
        "type",
        "num_blocks_per_cache_level",
        "parent_hash",
        "blocks",
        "block_hash",
        "block_hashes",
        "tokens",
        "token_id",
        "token_extra_id",
        "cache_level",
        "priority",
        "mm_keys",
        "cache_salt",
        "layer_group_id",
        "lora_id",
        "lora_name",
    }
)

EVENT_TYPES: Final = frozenset({"created", "stored", "removed", "updated", "all_cleared"})

STATS_KEYS: Final = frozenset(
    {
        "attentionDpRank",
        "iter",
        "iterLatencyMS",
        "numActiveRequests",
        "numQueuedRequests",
        "maxNumActiveRequests",
        "gpuMemUsage",
        "kvCacheStats",
        "maxNumBlocks",
        "freeNumBlocks",
        "usedNumBlocks",
        "tokensPerBlock",
        "allocTotalBlocks",
        "reusedBlocks",
        "missedBlocks",
        "cacheHitRate",
        "inflightBatchingStats",
        "numScheduledRequests",
        "numContextRequests",
        "numGenRequests",
        "numPausedRequests",
        "numCtxTokens",
        "avgNumDecodedTokensPerIter",
        "specDecodingStats",
        "numDraftTokens",
        "numAcceptedTokens",
        "acceptanceLength",
    }
)
