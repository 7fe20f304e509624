"""The metrics of a shard: names that dashboards and autoscalers read from vLLM, and kvloom's own."""

from __future__ import annotations

from typing import Final

from kvloom_common.metrics.series import FEW_TOKENS, LATENCY_SECONDS, TOKEN_SECONDS
from kvloom_common.metrics.table import MetricTable

# A row has two lines, of which the formatter makes six.
# fmt: off
TABLE: Final = MetricTable("shard")
ADAPTER_EVICTIONS: Final = TABLE.counter(
    "kvloom_shard_adapter_evictions", "evictions", "Adapters that the engine has dropped from its memory.", "model")
ADAPTER_LOADS: Final = TABLE.counter("kvloom_shard_adapter_loads", "loads", "Adapters loaded by the engine.", "model")
CACHED_BLOCKS: Final = TABLE.gauge(
    "kvloom_shard_cached_blocks", "blocks", "KV blocks in the prefix cache, as of the last step.", "model")
CONNECTED_ROUTERS: Final = TABLE.gauge(
    "kvloom_shard_connected_routers", "routers", "Routers with an open stream to this shard now.", "model")
DISCARDED_TOKENS: Final = TABLE.counter(
    "kvloom_shard_discarded_tokens", "tokens", "Tokens that the engine generated after their sequence had ended; not "
    "delivered.", "model")
FINISHED_SEQUENCES: Final = TABLE.counter(
    "kvloom_shard_finished_sequences", "sequences", "Sequences that ended, by how.", "reason")
KV_SHARE_BLOCKS: Final = TABLE.gauge(
    "kvloom_shard_kv_share_blocks", "blocks", "KV blocks of all guaranteed shares together, as of the last step: kept "
    "by their owners, lent to others, or held by owners beyond their shares.", "model", "use")
KV_SHARE_LAST_RESORTS: Final = TABLE.counter(
    "kvloom_shard_kv_share_last_resorts", "blocks", "Cached blocks evicted although a guaranteed share protected them, "
    "as nothing else was left.", "model")
LOST_REPORTS: Final = TABLE.gauge(
    "kvloom_shard_lost_reports", "1 while lost, else 0", "What TensorRT-LLM has stopped to report although it works: "
    "statistics (the load is then an estimate) or kv_events (routers then see an empty cache).", "model", "report")
QUEUED_PREFILL_TOKENS: Final = TABLE.gauge(
    "kvloom_shard_queued_prefill_tokens", "tokens", "Prompt tokens that wait for prefill, as of the last step.",
    "model")
WASTED_TOKENS: Final = TABLE.counter(
    "kvloom_shard_wasted_tokens", "tokens", "Tokens generated for sequences after their clients had left; part of the "
    "discarded ones.", "model")
WASTED_TOKENS_PER_CANCEL: Final = TABLE.histogram(
    "kvloom_shard_wasted_tokens_per_cancel", "tokens", "Tokens wasted on a cancelled sequence, observed once a "
    "sequence.", "model", buckets=FEW_TOKENS)
CACHE_CONFIG_INFO: Final = TABLE.gauge(
    "vllm:cache_config_info", "always 1", "The engine's KV cache: tokens in a block, and number of blocks, as labels.",
    "model_name", "block_size", "num_gpu_blocks")
E2E_REQUEST_LATENCY_SECONDS: Final = TABLE.histogram(
    "vllm:e2e_request_latency_seconds", "seconds", "From a sequence's arrival at the shard to its end, observed at its "
    "end.", "model_name", buckets=LATENCY_SECONDS)
GENERATION_TOKENS: Final = TABLE.counter(
    "vllm:generation_tokens", "tokens", "Tokens delivered to routers, counted at every step.", "model_name")
INTER_TOKEN_LATENCY_SECONDS: Final = TABLE.histogram(
    "vllm:inter_token_latency_seconds", "seconds", "Time between consecutive engine steps that both had tokens, "
    "observed once a step.", "model_name", buckets=TOKEN_SECONDS)
KV_CACHE_USAGE_PERC: Final = TABLE.gauge(
    "vllm:kv_cache_usage_perc", "share of all blocks, from 0 to 1", "KV blocks in use by sequences, as of the last "
    "step.", "model_name")
LORA_REQUESTS_INFO: Final = TABLE.gauge(
    "vllm:lora_requests_info", "seconds since 1970, of the last change", "Adapters of running and of waiting "
    "sequences, and how many can be loaded, as labels.", "max_lora", "waiting_lora_adapters", "running_lora_adapters")
NUM_PREEMPTIONS: Final = TABLE.counter(
    "vllm:num_preemptions", "preemptions", "Preemptions of sequences by the engine for lack of KV blocks.",
    "model_name")
NUM_REQUESTS_RUNNING: Final = TABLE.gauge(
    "vllm:num_requests_running", "sequences", "Sequences in the engine's batch, as of the last step.", "model_name")
NUM_REQUESTS_WAITING: Final = TABLE.gauge(
    "vllm:num_requests_waiting", "sequences", "Sequences that wait for the engine, as of the last step.", "model_name")
PREFIX_CACHE_HITS: Final = TABLE.counter(
    "vllm:prefix_cache_hits", "tokens", "Prompt tokens found in the prefix cache.", "model_name")
PREFIX_CACHE_QUERIES: Final = TABLE.counter(
    "vllm:prefix_cache_queries", "tokens", "Prompt tokens looked up in the prefix cache.", "model_name")
PROMPT_TOKENS: Final = TABLE.counter(
    "vllm:prompt_tokens", "tokens", "Prompt tokens of sequences that produced their first token, cached ones too.",
    "model_name")
REQUEST_QUEUE_TIME_SECONDS: Final = TABLE.histogram(
    "vllm:request_queue_time_seconds", "seconds", "From a sequence's arrival at the shard to its scheduling, observed "
    "at its first token.", "model_name", buckets=LATENCY_SECONDS)
SPEC_DECODE_NUM_ACCEPTED_TOKENS: Final = TABLE.counter(
    "vllm:spec_decode_num_accepted_tokens", "tokens", "Drafted tokens that the model accepted.", "model_name")
SPEC_DECODE_NUM_DRAFT_TOKENS: Final = TABLE.counter(
    "vllm:spec_decode_num_draft_tokens", "tokens", "Tokens drafted by speculative decoding.", "model_name")
TIME_TO_FIRST_TOKEN_SECONDS: Final = TABLE.histogram(
    "vllm:time_to_first_token_seconds", "seconds", "From a sequence's arrival at the shard to its first token, "
    "observed at that token.", "model_name", buckets=LATENCY_SECONDS)
