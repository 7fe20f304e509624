"""A shard's metrics: the names that dashboards and autoscalers read from vLLM, and kvloom's own. Updated per step and
per sequence, never per token."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from kvloom.v1.generation_pb2 import FinishReason
from kvloom_common.metrics.buckets import LATENCY_SECONDS, TOKEN_SECONDS, WASTED_TOKENS
from shard_server.engines.base import AdaptersState, EngineLoad, KvShareUsage


class ShardMetrics:
    """There is one per process; tests pass a registry of their own. The model's label is `model_name` on `vllm:`
    metrics, as in vLLM, and `model` on all others."""

    def __init__(self, model: str, block_size: int, num_blocks: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._num_blocks = num_blocks
        self._num_preemptions_seen = 0
        self._num_draft_tokens_seen = 0
        self._num_accepted_tokens_seen = 0
        self._adapters_seen: tuple[str, ...] = ()
        self._num_adapter_loads_seen = self._num_adapter_evictions_seen = 0

        def labels(name: str) -> list[str]:
            return ["model_name" if name.startswith("vllm:") else "model"]

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, labels(name), registry=registry).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels(name), registry=registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = LATENCY_SECONDS) -> Histogram:
            return Histogram(name, text, labels(name), buckets=buckets, registry=registry).labels(model)

        self._running = gauge(
            "vllm:num_requests_running", "Sequences in the engine's batch, as of the last step. Unit: sequences."
        )
        self._waiting = gauge(
            "vllm:num_requests_waiting", "Sequences that wait for the engine, as of the last step. Unit: sequences."
        )
        self._kv_usage = gauge(
            "vllm:kv_cache_usage_perc",
            "KV blocks in use by sequences, as of the last step. Unit: share of all blocks, from 0 to 1.",
        )
        cache_config = Gauge(
            "vllm:cache_config_info",
            "The engine's KV cache: tokens in a block, and number of blocks, as labels. Unit: always 1.",
            ["model_name", "block_size", "num_gpu_blocks"],
            registry=registry,
        )
        cache_config.labels(model, str(block_size), str(num_blocks)).set(1)
        self._preemptions = counter(
            "vllm:num_preemptions", "Preemptions of sequences by the engine for lack of KV blocks. Unit: preemptions."
        )
        self._prompt_tokens = counter(
            "vllm:prompt_tokens",
            "Prompt tokens of sequences that produced their first token, cached ones too. Unit: tokens.",
        )
        self._generation_tokens = counter(
            "vllm:generation_tokens", "Tokens delivered to routers, counted at every step. Unit: tokens."
        )
        self._prefix_queries = counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache. Unit: tokens."
        )
        self._prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache. Unit: tokens.")
        self._draft_tokens = counter(
            "vllm:spec_decode_num_draft_tokens", "Tokens drafted by speculative decoding. Unit: tokens."
        )
        self._accepted_tokens = counter(
            "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that the model accepted. Unit: tokens."
        )
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds",
            "From a sequence's arrival at the shard to its first token, observed at that token. Unit: seconds.",
        )
        self._itl = histogram(
            "vllm:inter_token_latency_seconds",
            "Time between consecutive engine steps that both had tokens, observed once a step. Unit: seconds.",
            TOKEN_SECONDS,
        )
        self._queue_time = histogram(
            "vllm:request_queue_time_seconds",
            "From a sequence's arrival at the shard to its scheduling, observed at its first token. Unit: seconds.",
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds",
            "From a sequence's arrival at the shard to its end, observed at its end. Unit: seconds.",
        )
        self._finished = Counter(
            "kvloom_shard_finished_sequences",
            "Sequences that ended, by how. Unit: sequences.",
            ["reason"],
            registry=registry,
        )
        self._discarded = counter(
            "kvloom_shard_discarded_tokens",
            "Tokens that the engine generated after their sequence had ended; not delivered. Unit: tokens.",
        )
        self._wasted = counter(
            "kvloom_shard_wasted_tokens",
            "Tokens generated for sequences after their clients had left; part of the discarded ones. Unit: tokens.",
        )
        self._wasted_each = histogram(
            "kvloom_shard_wasted_tokens_per_cancel",
            "Tokens wasted on a cancelled sequence, observed once a sequence. Unit: tokens.",
            WASTED_TOKENS,
        )
        self._queued_prefill = gauge(
            "kvloom_shard_queued_prefill_tokens",
            "Prompt tokens that wait for prefill, as of the last step. Unit: tokens.",
        )
        self._cached_blocks = gauge(
            "kvloom_shard_cached_blocks", "KV blocks in the prefix cache, as of the last step. Unit: blocks."
        )
        # As in vLLM: the time of the last change, under labels that say what it was.
        self._adapters = Gauge(
            "vllm:lora_requests_info",
            "Adapters of running and of waiting sequences, and how many can be loaded, as labels. Unit: seconds since "
            "1970, of the last change.",
            ["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
            registry=registry,
        )
        self._adapter_loads = counter("kvloom_shard_adapter_loads", "Adapters loaded by the engine. Unit: loads.")
        self._adapter_evictions = counter(
            "kvloom_shard_adapter_evictions", "Adapters that the engine has dropped from its memory. Unit: evictions."
        )
        # Without owners: metrics of shards are open, and the number of owners would be, too.
        self._kv_shares = Gauge(
            "kvloom_shard_kv_share_blocks",
            "KV blocks of all guaranteed shares together, as of the last step: kept by their owners, lent to others, "
            "or held by owners beyond their shares. Unit: blocks.",
            ["model", "use"],
            registry=registry,
        )
        self._kv_last_resorts = counter(
            "kvloom_shard_kv_share_last_resorts",
            "Cached blocks evicted although a guaranteed share protected them, as nothing else was left. Unit: blocks.",
        )
        self._lost_reports = Gauge(
            "kvloom_shard_lost_reports",
            "What TensorRT-LLM has stopped to report although it works: statistics (the load is then an estimate) or "
            "kv_events (routers then see an empty cache). Unit: 1 while lost, else 0.",
            ["model", "report"],
            registry=registry,
        )
        self._lost_reports_seen: tuple[str, ...] = ()
        self._model = model
        self._num_kv_last_resorts_seen = 0
        self._routers = gauge(
            "kvloom_shard_connected_routers", "Routers with an open stream to this shard now. Unit: routers."
        )

    def on_new_engine(self) -> None:
        """The engine's counts begin at 0 again."""
        self._num_preemptions_seen = self._num_draft_tokens_seen = self._num_accepted_tokens_seen = 0
        self._num_adapter_loads_seen = self._num_adapter_evictions_seen = 0
        self._num_kv_last_resorts_seen = 0

    def on_adapters(self, state: AdaptersState) -> None:
        """Adapters were registered, loaded, evicted or taken away, or other sequences use them."""
        labels = str(state.max_loaded), ",".join(state.waiting), ",".join(state.running)
        if labels != self._adapters_seen:
            self._adapters_seen = labels
            self._adapters.clear()
            self._adapters.labels(*labels).set_to_current_time()
        self._adapter_loads.inc(state.num_loads - self._num_adapter_loads_seen)
        self._adapter_evictions.inc(state.num_evictions - self._num_adapter_evictions_seen)
        self._num_adapter_loads_seen, self._num_adapter_evictions_seen = state.num_loads, state.num_evictions

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
        num_unused = load.num_available_blocks
        if load.kv_shares is not None:
            num_unused += load.kv_shares.num_protected
            self._on_kv_shares(load.kv_shares)
        self._kv_usage.set(1.0 - num_unused / self._num_blocks)
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
        if load.lost_reports != self._lost_reports_seen:
            for report in {*load.lost_reports, *self._lost_reports_seen}:
                self._lost_reports.labels(self._model, report).set(report in load.lost_reports)
            self._lost_reports_seen = load.lost_reports
        if step_seconds is not None:
            self._itl.observe(step_seconds)

    def _on_kv_shares(self, usage: KvShareUsage) -> None:
        for use, num_blocks in (("kept", usage.num_kept), ("lent", usage.num_lent), ("beyond", usage.num_beyond)):
            self._kv_shares.labels(self._model, use).set(num_blocks)
        self._kv_last_resorts.inc(usage.num_last_resorts - self._num_kv_last_resorts_seen)
        self._num_kv_last_resorts_seen = usage.num_last_resorts

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
