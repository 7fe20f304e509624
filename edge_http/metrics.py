"""The edge's metrics: counted once a request, never once a token. Names are OpenTelemetry's where it has one.

The `model` label only ever holds names of models that this edge serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.registry import Collector

from edge_http.answers.answer import Answer
from kvloom.process.fast_metrics import CounterFamily, CounterSeries, HistogramFamily, HistogramSeries
from kvloom.v1.error_reason_pb2 import ErrorReason

CONTENT_TYPE: Final = prometheus_client.CONTENT_TYPE_LATEST
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
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
            "kvloom_edge_requests", "HTTP requests by route and status.", ("route", "status"), registry
        )
        self._disconnects = Counter(
            "kvloom_edge_client_disconnects", "Clients that went away before their answer ended.", registry=registry
        )
        self._slow_clients = Counter(
            "kvloom_edge_slow_clients", "Streams ended because the client read too slowly.", registry=registry
        )
        self.output_tokens = CounterFamily(
            "kvloom_edge_output_tokens", "Tokens received for clients.", ("model",), registry
        )
        self._events = CounterFamily("kvloom_edge_sse_events", "Server-sent events written.", (), registry).labels()
        self._resumed = Counter(
            "kvloom_edge_resumed_streams", "Streams taken up again by their client.", registry=registry
        )
        self._taken_over = Counter(
            "kvloom_edge_taken_over_responses",
            "Running answers of other edges that went on here after those had died.",
            registry=registry,
        )
        self._replayed = Counter(
            "kvloom_edge_replayed_events", "Events sent again, or late, to clients that resumed.", registry=registry
        )
        self._expired = Counter(
            "kvloom_edge_expired_responses", "Answers cancelled because no client came back.", registry=registry
        )
        self._evicted = Counter(
            "kvloom_edge_evicted_responses", "Answers whose events were forgotten to keep others'.", registry=registry
        )
        self._unclaimed = Counter(
            "kvloom_edge_unclaimed_events",
            "Events of expired answers that were generated after their client had left, in vain.",
            registry=registry,
        )
        running = Gauge("kvloom_edge_running_requests", "Generation requests under way.", registry=registry)
        running.set_function(num_running)
        connected = Gauge("kvloom_edge_router_connected", "1 while the link to the router is up.", registry=registry)
        connected.set_function(lambda: float(is_connected()))
        self._duration = HistogramFamily(
            "gen_ai_server_request_duration_seconds",
            "From the prompt's submission to the last token.",
            (*_GEN_AI_LABELS, "error_type"),
            _SECONDS,
            registry,
        )
        self.ttft = HistogramFamily(
            "gen_ai_server_time_to_first_token_seconds",
            "From the prompt's submission to the first token.",
            _GEN_AI_LABELS,
            _SECONDS,
            registry,
        )
        self.tpot = HistogramFamily(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between the tokens of an answer, after the first.",
            _GEN_AI_LABELS,
            _TOKEN_SECONDS,
            registry,
        )
        self.usage = HistogramFamily(
            "gen_ai_client_token_usage",
            "Tokens of a request.",
            (*_GEN_AI_LABELS, "gen_ai_token_type"),
            _TOKENS,
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

    def on_disconnect(self) -> None:
        self._disconnects.inc()

    def watch_resumable(
        self, num_kept: Callable[[], float], num_unattended: Callable[[], float], num_bytes: Callable[[], float]
    ) -> None:
        """Gauges of the resumable responses."""
        for name, text, function in (
            ("kvloom_edge_resumable_responses", "Responses that can be resumed.", num_kept),
            ("kvloom_edge_unattended_responses", "Of those, running ones that no client reads.", num_unattended),
            ("kvloom_edge_resume_bytes", "Held for resumable responses.", num_bytes),
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

    def on_evicted(self) -> None:
        self._evicted.inc()

    def on_answer(self, operation: str, model: str, answer: Answer, num_prompt_tokens: int, num_events: int) -> None:
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
