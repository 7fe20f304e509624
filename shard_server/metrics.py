"""A shard's metrics: the names that dashboards and autoscalers read from vLLM, and kvloom's own. Updated per step and
per sequence, never per token."""

from __future__ import annotations

from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kvloom.v1.generation_pb2 import FinishReason
from shard_server.engines.base import EngineLoad

_LATENCY_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

_WASTED_TOKENS: Final = (0, 1, 2, 3, 4, 8, 16, 32, 64)


class ShardMetrics:
    """There is one per process; tests pass a registry of their own."""

    def __init__(self, model: str, num_blocks: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._num_blocks = num_blocks
        self._num_preemptions_seen = 0
        self._num_draft_tokens_seen = 0
        self._num_accepted_tokens_seen = 0

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["model_name"], registry=registry).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model_name"], registry=registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _LATENCY_SECONDS) -> Histogram:
            return Histogram(name, text, ["model_name"], buckets=buckets, registry=registry).labels(model)

        self._running = gauge("vllm:num_requests_running", "Sequences in the engine's batch")
        self._waiting = gauge("vllm:num_requests_waiting", "Sequences that wait for the engine")
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use (1 = all)")
        self._preemptions = counter("vllm:num_preemptions", "Sequences preempted for lack of KV blocks")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of started sequences")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens delivered to routers")
        self._prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self._prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted by speculation")
        self._accepted_tokens = counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were right")
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Receipt of a sequence to its first token")
        self._itl = histogram(
            "vllm:inter_token_latency_seconds", "Time between engine steps with tokens, one value a step", _STEP_SECONDS
        )
        self._queue_time = histogram("vllm:request_queue_time_seconds", "Receipt of a sequence to its scheduling")
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Receipt of a sequence to its end")
        self._finished = Counter(
            "kvloom_shard_finished_sequences", "Sequences by how they ended", ["reason"], registry=registry
        )
        self._discarded = counter("kvloom_shard_discarded_tokens", "Tokens generated after their sequence had ended")
        self._wasted = counter(
            "kvloom_wasted_tokens", "Tokens generated for sequences after their clients had gone; not delivered"
        )
        self._wasted_each = histogram(
            "kvloom_shard_wasted_tokens_per_cancel", "Wasted tokens of each cancelled sequence", _WASTED_TOKENS
        )
        self._queued_prefill = gauge("kvloom_shard_queued_prefill_tokens", "Prompt tokens that wait for prefill")
        self._cached_blocks = gauge("kvloom_shard_cached_blocks", "KV blocks in the prefix cache")
        self._routers = gauge("kvloom_shard_connected_routers", "Routers with an open stream")

    def on_step(
        self,
        load: EngineLoad,
        num_tokens: int,
        num_discarded_tokens: int,
        num_cached_blocks: int,
        step_seconds: float | None,
    ) -> None:
        """`step_seconds` is the time since the previous step, if both steps had tokens."""
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._queued_prefill.set(load.num_queued_prefill_tokens)
        self._kv_usage.set(1.0 - load.num_available_blocks / self._num_blocks)
        self._cached_blocks.set(num_cached_blocks)
        self._generation_tokens.inc(num_tokens)
        if num_discarded_tokens:
            self._discarded.inc(num_discarded_tokens)
        if load.num_preemptions > self._num_preemptions_seen:
            self._preemptions.inc(load.num_preemptions - self._num_preemptions_seen)
            self._num_preemptions_seen = load.num_preemptions
        if load.num_draft_tokens > self._num_draft_tokens_seen:
            self._draft_tokens.inc(load.num_draft_tokens - self._num_draft_tokens_seen)
            self._accepted_tokens.inc(load.num_accepted_tokens - self._num_accepted_tokens_seen)
            self._num_draft_tokens_seen = load.num_draft_tokens
            self._num_accepted_tokens_seen = load.num_accepted_tokens
        if step_seconds is not None:
            self._itl.observe(step_seconds)

    def on_start(
        self, num_prompt_tokens: int, num_cached_tokens: int, queue_time_seconds: float, ttft_seconds: float
    ) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prefix_queries.inc(num_prompt_tokens)
        self._prefix_hits.inc(min(num_cached_tokens, num_prompt_tokens))
        self._queue_time.observe(queue_time_seconds)
        self._ttft.observe(ttft_seconds)

    def on_finish(self, reason: FinishReason.ValueType, e2e_latency_seconds: float) -> None:
        self._finished.labels(FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()).inc()
        self._e2e.observe(e2e_latency_seconds)

    def on_unwanted_end(self, num_wasted_tokens: int) -> None:
        """The engine has ended a sequence that was cancelled because its client no longer wanted it."""
        self._wasted.inc(num_wasted_tokens)
        self._wasted_each.observe(num_wasted_tokens)

    def on_routers(self, num_routers: int) -> None:
        self._routers.set(num_routers)
