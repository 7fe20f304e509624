"""The router's Prometheus metrics and request log: updated once per request or per scrape, never per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
import structlog
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric

from kvloom.errors import KvloomError, reason_name
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from kvloom_common.metrics.series import LATENCY_SECONDS, MAX_LABEL_VALUES, OTHER, CounterSeries, LabelValues
from kvloom_common.metrics.table import CollectorOf, GaugeRecord
from kvloom_common.process.request_context import request_fields
from router import metric_table as table
from router.caller_scope import shown_id
from router.core.actions import (
    PlacementDecided,
    PrefillLegCounted,
    RequestDegraded,
    RequestEnded,
    RequestsMoved,
    SequencesPreempted,
    ShardHealthChanged,
)
from router.core.fleet.fleet import ModelState, ShardState
from router.core.fleet.shard_health import HealthState
from router.core.objectives import ObjectivesOutcome
from router.core.request_end import NO_MOVES, end_of
from router.decisions.responses import regret_of
from router.usage_records import Credit

log = structlog.get_logger()


JUDGED_PART: Final = 32
"""One in so many requests has its prediction judged: the errors of all would cost more than predicting them."""


class _ModelSeries:
    """The series of one model and class, looked up once: a lookup by labels costs more than counting."""

    __slots__ = (
        "attempts",
        "cached_input",
        "duration",
        "ended",
        "input",
        "output",
        "prefill",
        "queue_time",
        "tpot",
        "ttft",
    )

    def __init__(self, metrics: RouterMetrics, model: str, class_name: str) -> None:
        self.ended: dict[tuple[int, int], tuple[CounterSeries, str, str, str]] = {}
        """(finish reason, error reason) -> see RouterMetrics._outcome."""
        self.attempts = metrics.attempts.labels(model)
        self.input = metrics.tokens.labels(model, "input")
        self.cached_input = metrics.cached_tokens.labels(model)
        self.output = metrics.tokens.labels(model, "output")
        self.duration = metrics.duration.labels(model, class_name)
        self.queue_time = metrics.queue_time.labels(model, class_name)
        self.prefill = metrics.prefill.labels(model, class_name)
        self.ttft = metrics.ttft.labels(model, class_name)
        self.tpot = metrics.tpot.labels(model, class_name)


class RouterMetrics:
    """All names begin with `kvloom_router_`: the router's view of the requests of edges and of gRPC clients. Those of
    OpenTelemetry's GenAI conventions belong to the edge (docs/adr/0022-one-meaning-per-metric-name.md)."""

    def __init__(
        self,
        models: Callable[[], Iterable[ModelState]],
        shards: Callable[[], Iterable[ShardState]],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._models = models
        self._shards = shards
        self._model_names: set[str] = set()
        self._model_labels = LabelValues()
        self._series_by_model: dict[tuple[str, str], _ModelSeries] = {}
        self._registry = registry
        self._requests = table.REQUESTS.family(registry)
        self._refused = table.REQUESTS_INVALID.family(registry)
        self.tokens = table.TOKENS.family(registry)
        self.cached_tokens = table.CACHED_INPUT_TOKENS.family(registry)
        self._tokens_credited = table.TOKENS_CREDITED.family(registry)
        self.attempts = table.ATTEMPTS.family(registry)
        self._trips = table.SHARD_TRIPS.family(registry)
        self._moved = table.REQUESTS_MOVED.family(registry)
        self._preempted = table.SEQUENCES_PREEMPTED.series(registry)
        self._failed_over = table.SEQUENCES_FAILED_OVER.series(registry)
        self._num_unjudged = JUDGED_PART
        """Requests that ended since the last one whose prediction was judged; the first one is."""
        self._prediction_error = table.PREDICTION_ERROR_SECONDS.family(registry)
        self._unserved = table.REQUESTS_UNSERVED.family(registry)
        self._disrupted = table.REQUESTS_DISRUPTED.family(registry)
        self._objectives = table.OBJECTIVES.family(registry)
        self._impossible = table.OBJECTIVES_IMPOSSIBLE.family(registry)
        self._legs_begun = table.PREFILL_LEGS_BEGUN.family(registry)
        self._legs_ended = table.PREFILL_LEGS_ENDED.family(registry)
        self._answers_inexact = table.ANSWERS_INEXACT.series(registry)
        self._degraded = table.BROWNOUT_REQUESTS.family(registry)
        self._decisions_dropped = table.DECISIONS_DROPPED.series(registry)
        self.duration = table.REQUEST_DURATION_SECONDS.family(registry)
        self.ttft = table.TIME_TO_FIRST_TOKEN_SECONDS.family(registry)
        self.tpot = table.TIME_PER_OUTPUT_TOKEN_SECONDS.family(registry)
        self.queue_time = table.QUEUE_TIME_SECONDS.family(registry)
        self.prefill = table.PREFILL_SECONDS.family(registry)
        self._num_unregretted = JUDGED_PART
        """Placements since the last one whose regret was observed; the first one is."""
        self._regret = table.PLACEMENT_REGRET_SECONDS.family(registry)

    def placement_decided(self, decision: PlacementDecided) -> None:
        self._num_unregretted += 1
        if self._num_unregretted < JUDGED_PART:
            return
        self._num_unregretted = 0
        regret = regret_of(decision.plan)
        if regret is not None and math.isfinite(regret.ttft_seconds):
            self._regret.labels(self._model_label(decision.request.model)).observe(regret.ttft_seconds)

    def request_ended(self, ended: RequestEnded) -> None:
        series = self._series(ended.model, ended.priority_class.name)
        outcomes = series.ended
        counted = outcomes.get((ended.reason, ended.error_reason))
        if counted is None:
            counted = outcomes[ended.reason, ended.error_reason] = self._outcome(ended)
        count, outcome, error_type, end = counted
        count.total += 1
        series.attempts.total += ended.num_attempts
        series.input.total += ended.num_prompt_tokens
        series.cached_input.total += ended.num_cached_tokens
        series.output.total += ended.num_output_tokens
        series.duration.observe(ended.e2e_latency_seconds)
        if ended.num_attempts:
            series.queue_time.observe(ended.queue_time_seconds)
        elif ended.reason == FINISH_REASON_ERROR:
            end = ended.end.value
            self._unserved.labels(self._model_label(ended.model), end).total += 1
            self._disrupted.labels(ended.priority_class.name, end, error_type).total += 1
        if ended.ttft_seconds is not None:
            series.ttft.observe(ended.ttft_seconds)
            prediction = ended.prediction
            if prediction is not None and prediction.engine_queue_seconds is not None:
                waited = ended.queue_time_seconds + prediction.engine_queue_seconds
                series.prefill.observe((prediction.started_after_seconds or waited) - waited)
            if ended.num_output_tokens > 1:
                decode_seconds = ended.e2e_latency_seconds - ended.ttft_seconds
                series.tpot.observe(decode_seconds / (ended.num_output_tokens - 1))
        if ended.objectives is not None:
            self._count_objectives(ended.objectives)
        self._num_unjudged += 1
        if self._num_unjudged >= JUDGED_PART:
            self._judge_prediction(ended)
        logger = log
        if ended.moves is not NO_MOVES:
            self._failed_over.inc(ended.moves.num_failovers)
            for disruption in ended.moves.words:
                self._disrupted.labels(ended.priority_class.name, disruption, "").total += 1
            logger = log.bind(**msgspec.structs.asdict(ended.moves))
        _log_end(logger, ended, outcome, error_type, end)

    def _judge_prediction(self, ended: RequestEnded) -> None:
        """A request without a prediction leaves its turn to the next one."""
        for judged in ended.judged_prediction:
            error = judged.error_seconds
            if error is not None:
                self._num_unjudged = 0
                direction = "late" if error >= 0 else "early"
                self._prediction_error.labels(self._model_label(ended.model), judged.term, direction).observe(
                    abs(error)
                )

    def _count_objectives(self, ended: ObjectivesOutcome) -> None:
        if ended.refused is not None:
            self._impossible.labels(ended.refused.value, ended.priority_class).total += 1
        outcomes = {"deadline": ended.deadline_met, "ttft": ended.ttft_met, "tpot": ended.tpot_met}
        for kind, is_met in outcomes.items():
            if is_met is not None:
                self._objectives.labels(kind, ended.priority_class, "met" if is_met else "missed").total += 1

    def tokens_credited(self, credit: Credit) -> None:
        self._tokens_credited.labels(self._model_label(credit.model)).inc(credit.num_tokens)
        log.info(
            "request_credited",
            request_id=shown_id(credit.request_id, credit.tenant),
            tenant=credit.tenant,
            model=credit.model,
            num_credited_tokens=credit.num_tokens,
        )

    def request_refused(self, error: KvloomError) -> None:
        self._refused.labels(error.reason_name.lower()).inc()

    def shard_health_changed(self, change: ShardHealthChanged) -> None:
        if change.state is HealthState.SUSPECTED:
            self._trips.labels(change.symptom).inc()

    def requests_moved(self, moved: RequestsMoved) -> None:
        self._moved.labels(moved.reason.value).inc(moved.num_requests)

    def sequences_preempted(self, preempted: SequencesPreempted) -> None:
        self._preempted.inc(len(preempted.slots))

    def prefill_leg_counted(self, counted: PrefillLegCounted) -> None:
        model = self._model_label(counted.model)
        if counted.outcome is None:
            self._legs_begun.labels(model).inc()
        else:
            self._legs_ended.labels(model, counted.outcome.value).inc()

    def answer_resampled(self) -> None:
        self._answers_inexact.inc()

    def request_degraded(self, degraded: RequestDegraded) -> None:
        for effect in degraded.effects:
            self._degraded.labels(self._model_label(degraded.model), effect).inc()

    def decisions_dropped(self, count: int) -> None:
        self._decisions_dropped.inc(count)

    def ended_counts(self) -> tuple[int, int, list[int]]:
        """Counts of all models together: requests that ended, those with an error, and the buckets of their TTFT."""
        series = list({id(one): one for one in self._series_by_model.values()}.values())
        # Classes of a model share the series of an outcome.
        ended = {id(counted[0]): counted for one in series for counted in one.ended.values()}.values()
        num_ended = int(sum(count.total for count, *_ in ended))
        num_failed = int(sum(count.total for count, _, error_type, _ in ended if error_type))
        ttft = [sum(counts) for counts in zip(*(one.ttft.counts for one in series), strict=True)]
        return num_ended, num_failed, ttft or [0] * (len(LATENCY_SECONDS) + 1)

    def watch(self, gauges: Callable[[], Mapping[GaugeRecord, float]]) -> None:
        """Shows these gauges, and the fleet, whenever the metrics are scraped."""
        CollectorOf(self._registry, lambda: self._of_fleet(gauges()))

    def _series(self, model: str, class_name: str) -> _ModelSeries:
        series = self._series_by_model.get((model, class_name))
        if series is None:
            labels = self._model_label(model), class_name  # classes are those of the configuration
            series = self._series_by_model.get(labels)
            if series is None:
                series = self._series_by_model[labels] = _ModelSeries(self, *labels)
        return series

    def _outcome(self, ended: RequestEnded) -> tuple[CounterSeries, str, str, str]:
        """(series, outcome, error type, end), the end being that of a request that was sent to a shard."""
        outcome = FINISH_REASON_NAMES[ended.reason]
        error_type = reason_name(ended.error_reason).lower() if ended.error_reason else ""
        series = self._requests.labels(self._model_label(ended.model), outcome, error_type)
        return series, outcome, error_type, end_of(ended.reason, is_admitted=True, was_sent=True).value

    def _model_label(self, model: str) -> str:
        """Returns "other" for models outside the fleet, because clients may ask for any name."""
        if model not in self._model_names:
            self._model_names.update(state.name for state in self._models())
        return self._model_labels.fold(model) if model in self._model_names else OTHER

    def _of_fleet(self, gauges: Mapping[GaugeRecord, float]) -> Iterator[Metric]:
        for record, value in gauges.items():
            yield record.collected(value)
        num_ready: dict[tuple[str, ...], float] = {}
        steps: dict[tuple[str, ...], float] = {}
        for model in self._models():
            label = (self._model_label(model.name),)
            num_ready[label] = num_ready.get(label, 0) + model.num_ready_shards
            steps[label] = max(steps.get(label, 0), model.brownout_step)
        yield table.SHARDS_READY.collected(num_ready)
        yield table.BROWNOUT_STEP.collected(steps)
        num_in_state: dict[tuple[str, ...], float] = {}
        for number, shard in enumerate(sorted(self._shards(), key=lambda shard: shard.description.shard_id)):
            label = shard.description.shard_id if number < MAX_LABEL_VALUES else OTHER
            for state in HealthState:
                key = label, state.value
                num_in_state[key] = num_in_state.get(key, 0) + (shard.health is state)
        yield table.SHARD_HEALTH.collected(num_in_state)


def _log_end(logger: Any, ended: RequestEnded, outcome: str, error_type: str, end: str) -> None:
    logger.info(
        "request_ended",
        **request_fields(
            shown_id(ended.request_id, ended.tenant), ended.client_request_id, ended.traceparent, ended.tenant
        ),
        model=ended.model,
        shard_id=ended.shard_id,
        outcome=outcome,
        error_type=error_type,
        end=end,
        num_attempts=ended.num_attempts,
        num_prompt_tokens=ended.num_prompt_tokens,
        num_cached_tokens=ended.num_cached_tokens,
        num_output_tokens=ended.num_output_tokens,
        queue_time_seconds=round(ended.queue_time_seconds, 6),
        ttft_seconds=None if ended.ttft_seconds is None else round(ended.ttft_seconds, 6),
        e2e_latency_seconds=round(ended.e2e_latency_seconds, 6),
    )
