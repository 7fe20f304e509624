"""A shard's metrics: the names that dashboards and autoscalers read from vLLM, and kvloom's own. Updated per step and
per sequence, never per token."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from kvloom.v1.generation_pb2 import FinishReason
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from kvloom_common.metrics.table import GaugeRecord
from shard_server import metric_table as table
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

        def gauge(record: GaugeRecord) -> Gauge:
            return record.gauge(registry).labels(model)

        self._running = gauge(table.NUM_REQUESTS_RUNNING)
        self._waiting = gauge(table.NUM_REQUESTS_WAITING)
        self._kv_usage = gauge(table.KV_CACHE_USAGE_PERC)
        table.CACHE_CONFIG_INFO.gauge(registry).labels(model, str(block_size), str(num_blocks)).set(1)
        self._preemptions = table.NUM_PREEMPTIONS.series(registry, model)
        self._prompt_tokens = table.PROMPT_TOKENS.series(registry, model)
        self._generation_tokens = table.GENERATION_TOKENS.series(registry, model)
        self._prefix_queries = table.PREFIX_CACHE_QUERIES.series(registry, model)
        self._prefix_hits = table.PREFIX_CACHE_HITS.series(registry, model)
        self._draft_tokens = table.SPEC_DECODE_NUM_DRAFT_TOKENS.series(registry, model)
        self._accepted_tokens = table.SPEC_DECODE_NUM_ACCEPTED_TOKENS.series(registry, model)
        self._ttft = table.TIME_TO_FIRST_TOKEN_SECONDS.series(registry, model)
        self._itl = table.INTER_TOKEN_LATENCY_SECONDS.series(registry, model)
        self._queue_time = table.REQUEST_QUEUE_TIME_SECONDS.series(registry, model)
        self._e2e = table.E2E_REQUEST_LATENCY_SECONDS.series(registry, model)
        self._finished = table.FINISHED_SEQUENCES.family(registry)
        self._discarded = table.DISCARDED_TOKENS.series(registry, model)
        self._wasted = table.WASTED_TOKENS.series(registry, model)
        self._wasted_each = table.WASTED_TOKENS_PER_CANCEL.series(registry, model)
        self._queued_prefill = gauge(table.QUEUED_PREFILL_TOKENS)
        self._cached_blocks = gauge(table.CACHED_BLOCKS)
        # As in vLLM: the time of the last change, under labels that say what it was.
        self._adapters = table.LORA_REQUESTS_INFO.gauge(registry)
        self._adapter_loads = table.ADAPTER_LOADS.series(registry, model)
        self._adapter_evictions = table.ADAPTER_EVICTIONS.series(registry, model)
        # Without owners: metrics of shards are open, and the number of owners would be, too.
        self._kv_shares = table.KV_SHARE_BLOCKS.gauge(registry)
        self._kv_last_resorts = table.KV_SHARE_LAST_RESORTS.series(registry, model)
        self._lost_reports = table.LOST_REPORTS.gauge(registry)
        self._lost_reports_seen: tuple[str, ...] = ()
        self._model = model
        self._num_kv_last_resorts_seen = 0
        self._routers = gauge(table.CONNECTED_ROUTERS)

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
        self._finished.labels(FINISH_REASON_NAMES[reason]).inc()
        self._e2e.observe(e2e_latency_seconds)

    def on_unwanted_end(self, num_wasted_tokens: int) -> None:
        """The engine has ended a sequence that was cancelled because its client no longer wanted it."""
        self._wasted.inc(num_wasted_tokens)
        self._wasted_each.observe(num_wasted_tokens)

    def on_routers(self, num_routers: int) -> None:
        self._routers.set(num_routers)
