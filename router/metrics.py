"""The router's Prometheus metrics and request log: updated once per request or per scrape, never per token."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvloom.errors import KvloomError, reason_name
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FinishReason
from kvloom_common.metrics.buckets import LATENCY_SECONDS, TOKEN_SECONDS
from kvloom_common.metrics.label_values import MAX_LABEL_VALUES, OTHER, LabelValues
from kvloom_common.process.fast_metrics import CounterFamily, CounterSeries, HistogramFamily
from kvloom_common.process.request_context import request_fields
from router.caller_scope import shown_id
from router.core.actions import (
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
from router.usage_records import Credit

log = structlog.get_logger()


GAUGES: Final = {
    "requests_live": "Requests that have been admitted and have not ended yet. Unit: requests.",
    "requests_queued": "Requests that wait in the router for a shard now. Unit: requests.",
    "clients_connected": "Edges and gRPC clients with open calls now. Unit: clients.",
    "safety_connected": "Whether the safety service can be reached now. Unit: 1 for yes, 0 for no.",
    "decisions_remembered": "Requests whose placement `kvloom explain` can explain now. Unit: requests.",
    "draining": "Whether the router drains, that is, takes no new requests. Unit: 1 for yes, 0 for no.",
}
"""The meanings of the gauges, by name without `kvloom_router_`."""


JUDGED_PART: Final = 32
"""One in so many requests has its prediction judged: the errors of all would cost more than predicting them."""


class _ModelSeries:
    """The series of one model. They are looked up once because a lookup by labels costs more than counting."""

    __slots__ = ("attempts", "cached_input", "duration", "ended", "input", "output", "queue_time", "tpot", "ttft")

    def __init__(self, metrics: RouterMetrics, model: str) -> None:
        self.ended: dict[tuple[int, int], tuple[CounterSeries, str, str, str]] = {}
        """(finish reason, error reason) -> see RouterMetrics._outcome."""
        self.attempts = metrics.attempts.labels(model)
        self.input = metrics.tokens.labels(model, "input")
        self.cached_input = metrics.cached_tokens.labels(model)
        self.output = metrics.tokens.labels(model, "output")
        self.duration = metrics.duration.labels(model)
        self.queue_time = metrics.queue_time.labels(model)
        self.ttft = metrics.ttft.labels(model)
        self.tpot = metrics.tpot.labels(model)


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
        self._series_by_model: dict[str, _ModelSeries] = {}
        self._registry = registry
        self._requests = CounterFamily(
            "kvloom_router_requests",
            "Requests that were admitted and have ended, by how and why. Unit: requests.",
            ("model", "outcome", "error_type"),
            registry,
        )
        self._refused = Counter(
            "kvloom_router_requests_invalid",
            "Requests that were refused before they were admitted, by reason. Unit: requests.",
            ("error_type",),
            registry=registry,
        )
        self.tokens = CounterFamily(
            "kvloom_router_tokens",
            "Tokens of requests that ended: of their prompts (input), and delivered ones (output). Unit: tokens.",
            ("model", "token_type"),
            registry,
        )
        self.cached_tokens = CounterFamily(
            "kvloom_router_cached_input_tokens",
            "Prompt tokens of requests that ended, which a shard found in its cache. Unit: tokens.",
            ("model",),
            registry,
        )
        self._tokens_credited = Counter(
            "kvloom_router_tokens_credited",
            "Output tokens of requests that ended, which were lost with the connection to their client. Unit: tokens.",
            ("model",),
            registry=registry,
        )
        self.attempts = CounterFamily(
            "kvloom_router_attempts",
            "Dispatches to shards, counted when their request ends. Unit: attempts.",
            ("model",),
            registry,
        )
        self._trips = Counter(
            "kvloom_router_shard_trips",
            "Suspicions of shards, by symptom. Unit: suspicions.",
            ("symptom",),
            registry=registry,
        )
        self._moved = Counter(
            "kvloom_router_requests_moved",
            "Requests taken off a shard that was suspected, handed over its work or had notice that it ends. Unit: "
            "requests.",
            ("reason",),
            registry=registry,
        )
        self._preempted = Counter(
            "kvloom_router_sequences_preempted",
            "Running sequences of tenants above their share that had to wait so that other tenants were served. Unit: "
            "sequences.",
            registry=registry,
        )
        self._failed_over = Counter(
            "kvloom_router_sequences_failed_over",
            "Sequences that continued after their shard or its engine had failed, counted when their request ends. "
            "Unit: sequences.",
            registry=registry,
        )
        self._num_unjudged = JUDGED_PART
        """Requests that ended since the last one whose prediction was judged; the first one is."""
        self._prediction_error = HistogramFamily(
            "kvloom_router_prediction_error_seconds",
            "How far off the prediction was that placed a request, for one in "
            f"{JUDGED_PART} requests: by what was predicted, and whether it came early or late. Unit: seconds.",
            ("model", "term", "direction"),
            LATENCY_SECONDS,
            registry,
        )
        self._unserved = CounterFamily(
            "kvloom_router_requests_unserved",
            "Requests that ended with an error before they were sent to a shard: rejected (never admitted), or evicted "
            "from the queue. Unit: requests.",
            ("model", "end"),
            registry,
        )
        self._disrupted = CounterFamily(
            "kvloom_router_requests_disrupted",
            "Requests that ended and were rejected or evicted, with the error, or had been preempted, migrated or "
            "failed over at least once. Unit: requests.",
            ("priority_class", "disruption", "error_type"),
            registry,
        )
        self._objectives = CounterFamily(
            "kvloom_router_objectives",
            "Objectives of requests that ended, by what they limit (deadline, ttft, tpot) and whether they were met or "
            "missed. Unit: objectives.",
            ("kind", "priority_class", "outcome"),
            registry,
        )
        self._impossible = CounterFamily(
            "kvloom_router_objectives_impossible",
            "Requests that were refused on arrival because their objectives could not be met: because of the load, or "
            "because of the speed of even an idle shard. Unit: requests.",
            ("cause", "priority_class"),
            registry,
        )
        self._legs_begun = Counter(
            "kvloom_router_prefill_legs_begun",
            "Prompts that were sent to a prefill shard for an answer of another shard. Unit: legs.",
            ("model",),
            registry=registry,
        )
        self._legs_ended = Counter(
            "kvloom_router_prefill_legs_ended",
            "Such prompts by outcome: used, when the answer was sent to its shard with the KV, or why the KV was lost. "
            "Unit: legs.",
            ("model", "outcome"),
            registry=registry,
        )
        self._answers_inexact = Counter(
            "kvloom_router_answers_inexact",
            "Answers that continued on a shard of another variant, or whose engine does not repeat its results, so "
            "that their tokens may differ. Unit: answers.",
            registry=registry,
        )
        self._degraded = Counter(
            "kvloom_router_brownout_requests",
            "Requests on which the brownout ladder had this effect when they arrived. Unit: requests.",
            ("model", "effect"),
            registry=registry,
        )
        self._decisions_dropped = Counter(
            "kvloom_router_decisions_dropped",
            "Placements that are missing from the decision log's file. Unit: placements.",
            registry=registry,
        )
        self.duration = self._histogram(
            "request_duration",
            "From a request's arrival at the router to its end, observed at its end.",
            LATENCY_SECONDS,
        )
        self.ttft = self._histogram(
            "time_to_first_token",
            "From a request's arrival at the router to its first token, observed at its end.",
            LATENCY_SECONDS,
        )
        self.tpot = self._histogram(
            "time_per_output_token",
            "Mean time between the tokens of a request after the first, observed once a request, at its end.",
            TOKEN_SECONDS,
        )
        self.queue_time = self._histogram(
            "queue_time",
            "From a request's arrival at the router to its first dispatch, observed at its end.",
            LATENCY_SECONDS,
        )

    def request_ended(self, ended: RequestEnded) -> None:
        series = self._series(ended.model)
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

    def watch(self, gauges: Callable[[], dict[str, float]]) -> None:
        """Exports these gauges (by name) and the fleet's state at every scrape."""
        self._registry.register(_FleetCollector(gauges, self._models, self._shards, self._model_label))

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> HistogramFamily:
        return HistogramFamily(
            f"kvloom_router_{name}_seconds", f"{about} Unit: seconds.", ("model",), buckets, self._registry
        )

    def _series(self, model: str) -> _ModelSeries:
        series = self._series_by_model.get(model)
        if series is None:
            label = self._model_label(model)
            series = self._series_by_model.get(label)
            if series is None:
                series = self._series_by_model[label] = _ModelSeries(self, label)
        return series

    def _outcome(self, ended: RequestEnded) -> tuple[CounterSeries, str, str, str]:
        """(series, outcome, error type, end), the end being that of a request that was sent to a shard."""
        outcome = FinishReason.Name(ended.reason).removeprefix("FINISH_REASON_").lower()
        error_type = reason_name(ended.error_reason).lower() if ended.error_reason else ""
        series = self._requests.labels(self._model_label(ended.model), outcome, error_type)
        return series, outcome, error_type, end_of(ended.reason, is_admitted=True, was_sent=True).value

    def _model_label(self, model: str) -> str:
        """Returns "other" for models outside the fleet, because clients may ask for any name."""
        if model not in self._model_names:
            self._model_names.update(state.name for state in self._models())
        return self._model_labels.fold(model) if model in self._model_names else OTHER


class _FleetCollector(Collector):
    def __init__(
        self,
        gauges: Callable[[], dict[str, float]],
        models: Callable[[], Iterable[ModelState]],
        shards: Callable[[], Iterable[ShardState]],
        model_label: Callable[[str], str],
    ) -> None:
        self._gauges = gauges
        self._models = models
        self._shards = shards
        self._model_label = model_label

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(f"kvloom_router_{name}", GAUGES[name], value=value)
        ready = GaugeMetricFamily(
            "kvloom_router_shards_ready", "Shards that take requests now. Unit: shards.", labels=["model"]
        )
        num_ready: dict[str, int] = {}
        steps: dict[str, int] = {}
        for model in self._models():
            label = self._model_label(model.name)
            num_ready[label] = num_ready.get(label, 0) + model.num_ready_shards
            steps[label] = max(steps.get(label, 0), model.brownout_step)
        for label, count in num_ready.items():
            ready.add_metric([label], count)
        yield ready
        brownout = GaugeMetricFamily(
            "kvloom_router_brownout_step",
            "The step of the brownout ladder on which the model is now, 0 for none; the highest of the models that are "
            "counted together as other. Unit: steps.",
            labels=["model"],
        )
        for label, step in steps.items():
            brownout.add_metric([label], step)
        yield brownout
        health = GaugeMetricFamily(
            "kvloom_router_shard_health",
            "Shards in this state now, by id; those above the limit are counted together as other. Unit: shards.",
            labels=["shard_id", "state"],
        )
        num_in_state: dict[tuple[str, str], int] = {}
        for number, shard in enumerate(sorted(self._shards(), key=lambda shard: shard.description.shard_id)):
            label = shard.description.shard_id if number < MAX_LABEL_VALUES else OTHER
            for state in HealthState:
                key = label, state.value
                num_in_state[key] = num_in_state.get(key, 0) + (shard.health is state)
        for key, count in num_in_state.items():
            health.add_metric(key, count)
        yield health


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
