"""The edge's metrics: counted once a request, never once a token.

Requests enter the fabric here, so the edge alone has the names of OpenTelemetry's GenAI conventions (`gen_ai_...`). The
labels for models only ever hold names of models that this edge serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.registry import Collector

from edge_http.answers.answer import EdgeAnswer
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.metrics.buckets import LATENCY_SECONDS, TOKEN_SECONDS, TOKENS
from kvloom_common.process.fast_metrics import CounterFamily, CounterSeries, HistogramFamily, HistogramSeries

CONTENT_TYPE: Final = prometheus_client.CONTENT_TYPE_LATEST
_GEN_AI_LABELS: Final = ("gen_ai_operation_name", "gen_ai_request_model")


class _OfModel:
    """The series of one operation and model. They are looked up by labels once: that costs more than counting."""

    __slots__ = ("input_usage", "output_tokens", "output_usage", "tpot", "ttft")

    def __init__(self, metrics: EdgeMetrics, operation: str, model: str) -> None:
        self.output_tokens = metrics.output_tokens.labels(model)
        self.input_usage = metrics.usage.labels(operation, model, "input")
        self.output_usage = metrics.usage.labels(operation, model, "output")
        self.ttft = metrics.ttft.labels(operation, model)
        self.tpot = metrics.tpot.labels(operation, model)


class EdgeMetrics:
    """One per edge, with a registry of its own."""

    def __init__(self, num_running: Callable[[], float], is_connected: Callable[[], bool]) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        prometheus_client.ProcessCollector(registry=registry)
        prometheus_client.GCCollector(registry=registry)
        self._requests = CounterFamily(
            "kvloom_edge_requests",
            "HTTP requests that were answered, refused ones too. Unit: requests.",
            ("route", "status"),
            registry,
        )
        self._disconnects = Counter(
            "kvloom_edge_client_disconnects",
            "Clients that went away before their answer ended. Unit: clients.",
            registry=registry,
        )
        self._slow_clients = Counter(
            "kvloom_edge_slow_clients",
            "Streams ended because the client read too slowly. Unit: streams.",
            registry=registry,
        )
        self.output_tokens = CounterFamily(
            "kvloom_edge_output_tokens",
            "Tokens of answers that ended, as received from routers. Unit: tokens.",
            ("model",),
            registry,
        )
        self._events = CounterFamily(
            "kvloom_edge_sse_events",
            "Server-sent events written, counted when their answer ends. Unit: events.",
            (),
            registry,
        ).labels()
        self._resumed = Counter(
            "kvloom_edge_resumed_streams", "Streams taken up again by their client. Unit: streams.", registry=registry
        )
        self._taken_over = Counter(
            "kvloom_edge_taken_over_responses",
            "Running answers of other edges that continued here after those had died. Unit: answers.",
            registry=registry,
        )
        self._replayed = Counter(
            "kvloom_edge_replayed_events",
            "Events sent again, or late, to clients that resumed. Unit: events.",
            registry=registry,
        )
        self._expired = Counter(
            "kvloom_edge_expired_responses",
            "Answers cancelled because no client came back. Unit: answers.",
            registry=registry,
        )
        self._evicted = Counter(
            "kvloom_edge_evicted_responses",
            "Answers whose events were forgotten to keep others'. Unit: answers.",
            registry=registry,
        )
        self._unclaimed = Counter(
            "kvloom_edge_unclaimed_events",
            "Events of expired answers that were generated in vain, after their client had left. Unit: events.",
            registry=registry,
        )
        self._discarded = Counter(
            "kvloom_edge_cascade_discarded_tokens",
            "Tokens of candidates of cascades that did not pass a test, or failed: no client got them. Unit: tokens.",
            ("route", "model", "reason"),
            registry=registry,
        )
        self._continued = Counter(
            "kvloom_edge_continued_answers",
            "Streamed answers whose model was lost and that the next model of their route continued. Unit: answers.",
            ("route", "model", "continued_by"),
            registry=registry,
        )
        self._nonconforming_calls = Counter(
            "kvloom_edge_nonconforming_calls",
            "Demanded tool calls whose arguments do not conform to their tool's schema, of which a guide has not "
            "followed all. Unit: calls.",
            registry=registry,
        )
        self._ignored_fields = CounterFamily(
            "kvloom_edge_ignored_fields",
            "Fields of requests that are not known and were left out, by name; of many names, most are `other`. Unit: "
            "fields.",
            ("field",),
            registry,
        )
        running = Gauge(
            "kvloom_edge_running_requests", "Generation requests under way now. Unit: requests.", registry=registry
        )
        running.set_function(num_running)
        connected = Gauge(
            "kvloom_edge_router_connected",
            "Whether the link to a router is up now. Unit: 1 for yes, 0 for no.",
            registry=registry,
        )
        connected.set_function(lambda: float(is_connected()))
        self._duration = HistogramFamily(
            "gen_ai_server_request_duration_seconds",
            "From a request's submission to a router to the end of its answer, observed at that end. Unit: seconds.",
            (*_GEN_AI_LABELS, "error_type"),
            LATENCY_SECONDS,
            registry,
        )
        self.ttft = HistogramFamily(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request's submission to a router to its first token, observed when the answer ends. Unit: seconds.",
            _GEN_AI_LABELS,
            LATENCY_SECONDS,
            registry,
        )
        self.tpot = HistogramFamily(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between the tokens of an answer after the first, observed when the answer ends. Unit: seconds.",
            _GEN_AI_LABELS,
            TOKEN_SECONDS,
            registry,
        )
        self.usage = HistogramFamily(
            "gen_ai_client_token_usage",
            "Tokens of a prompt (input) and of its answer (output), observed when the answer ends. Unit: tokens.",
            (*_GEN_AI_LABELS, "gen_ai_token_type"),
            TOKENS,
            registry,
        )

        self._of_model: dict[tuple[str, str], _OfModel] = {}
        self._durations: dict[tuple[str, str, str], HistogramSeries] = {}
        self._responses: dict[tuple[str, int], CounterSeries] = {}

    @property
    def registry(self) -> CollectorRegistry:
        return self._registry

    def add(self, collector: Collector) -> None:
        self._registry.register(collector)

    def on_response(self, route: str, status: int) -> None:
        """`route` is one of the routing table's names, never a path that a client made up."""
        series = self._responses.get((route, status))
        if series is None:
            series = self._responses[route, status] = self._requests.labels(route, str(status))
        series.total += 1

    def on_ignored_field(self, field: str) -> None:
        """`field` is one of a bounded number of names."""
        self._ignored_fields.labels(field).total += 1

    def on_nonconforming_call(self) -> None:
        self._nonconforming_calls.inc()

    def on_disconnect(self) -> None:
        self._disconnects.inc()

    def watch_resumable(
        self, num_kept: Callable[[], float], num_unattended: Callable[[], float], num_bytes: Callable[[], float]
    ) -> None:
        """Gauges of the resumable responses."""
        for name, text, function in (
            ("kvloom_edge_resumable_responses", "Responses that can be resumed now. Unit: responses.", num_kept),
            (
                "kvloom_edge_unattended_responses",
                "Running responses that can be resumed and that no client reads now. Unit: responses.",
                num_unattended,
            ),
            (
                "kvloom_edge_resume_bytes",
                "Size of the events held now for resumable responses. Unit: bytes.",
                num_bytes,
            ),
        ):
            Gauge(name, text, registry=self._registry).set_function(function)

    def on_resumed(self) -> None:
        self._resumed.inc()

    def on_taken_over(self) -> None:
        self._taken_over.inc()

    def on_replayed(self, num_events: int) -> None:
        self._replayed.inc(num_events)

    def on_slow_resumable_client(self) -> None:
        self._slow_clients.inc()

    def on_expired(self, num_unclaimed_events: int) -> None:
        """An answer was cancelled because no client came back; so many events came after the last had left."""
        self._expired.inc()
        self._unclaimed.inc(num_unclaimed_events)

    def on_discarded(self, route: str, model: str, reason: str, num_tokens: int) -> None:
        """A cascade went on to its next model; so many tokens of this one's answer were generated in vain."""
        self._discarded.labels(route, model, reason).inc(num_tokens)

    def on_continued(self, route: str, model: str, continued_by: str) -> None:
        """The answer that a model has lost goes on with a token of another one."""
        self._continued.labels(route, model, continued_by).inc()

    def on_evicted(self) -> None:
        self._evicted.inc()

    def on_answer(
        self, operation: str, model: str, answer: EdgeAnswer, num_prompt_tokens: int, num_events: int
    ) -> None:
        """An answer that was submitted is over, well or not. `model` is the served model's name."""
        now = time.monotonic()
        error_type = answer.error.reason_name.lower() if answer.error else ""
        duration = self._durations.get((operation, model, error_type))
        if duration is None:
            duration = self._duration.labels(operation, model, error_type)
            self._durations[operation, model, error_type] = duration
        duration.observe(now - answer.started_at)
        series = self._of_model.get((operation, model))
        if series is None:
            series = self._of_model[operation, model] = _OfModel(self, operation, model)
        series.output_tokens.total += answer.num_output_tokens
        series.input_usage.observe(num_prompt_tokens)
        series.output_usage.observe(answer.num_output_tokens)
        self._events.total += num_events
        if answer.first_token_at is not None:
            series.ttft.observe(answer.first_token_at - answer.started_at)
            tokens_per_choice = answer.num_output_tokens / answer.num_choices
            if tokens_per_choice > 1:
                series.tpot.observe((now - answer.first_token_at) / (tokens_per_choice - 1))
        if answer.error is not None and answer.error.reason == ErrorReason.ERROR_REASON_CLIENT_TOO_SLOW:
            self._slow_clients.inc()

    def exposition(self) -> bytes:
        return prometheus_client.generate_latest(self._registry)
