"""The edge's metrics: counted once a request, never once a token.

Requests enter the fabric here, so the edge alone has the names of OpenTelemetry's GenAI conventions (`gen_ai_...`). The
labels for models only ever hold names of models that this edge serves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import prometheus_client
from prometheus_client import CollectorRegistry

from edge_http import metric_table as table
from edge_http.answers.answer import EdgeAnswer
from kvloom.router_link.group import RouterGroup
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.metrics.series import CounterSeries, HistogramSeries
from kvloom_common.metrics.table import CollectorOf

CONTENT_TYPE: Final = prometheus_client.CONTENT_TYPE_LATEST
MAX_LATEST: Final = 2048
"""Answers whose durations are kept, for those who ask what made a request slow."""


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
        self._requests = table.REQUESTS.family(registry)
        self._disconnects = table.CLIENT_DISCONNECTS.series(registry)
        self._slow_clients = table.SLOW_CLIENTS.series(registry)
        self.output_tokens = table.OUTPUT_TOKENS.family(registry)
        self._events = table.SSE_EVENTS.series(registry)
        self._resumed = table.RESUMED_STREAMS.series(registry)
        self._taken_over = table.TAKEN_OVER_RESPONSES.series(registry)
        self._replayed = table.REPLAYED_EVENTS.series(registry)
        self._expired = table.EXPIRED_RESPONSES.series(registry)
        self._evicted = table.EVICTED_RESPONSES.series(registry)
        self._unclaimed = table.UNCLAIMED_EVENTS.series(registry)
        self._discarded = table.CASCADE_DISCARDED_TOKENS.family(registry)
        self._continued = table.CONTINUED_ANSWERS.family(registry)
        self._nonconforming_calls = table.NONCONFORMING_CALLS.series(registry)
        self._ignored_fields = table.IGNORED_FIELDS.family(registry)
        table.RUNNING_REQUESTS.watch(registry, num_running)
        table.ROUTER_CONNECTED.watch(registry, lambda: float(is_connected()))
        self._duration = table.GEN_AI_SERVER_REQUEST_DURATION_SECONDS.family(registry)
        self.ttft = table.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN_SECONDS.family(registry)
        self.tpot = table.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN_SECONDS.family(registry)
        self.usage = table.GEN_AI_CLIENT_TOKEN_USAGE.family(registry)

        self._latest: deque[tuple[str, float]] = deque(maxlen=MAX_LATEST)
        self._of_model: dict[tuple[str, str], _OfModel] = {}
        self._durations: dict[tuple[str, str, str], HistogramSeries] = {}
        self._responses: dict[tuple[str, int], CounterSeries] = {}

    @property
    def registry(self) -> CollectorRegistry:
        return self._registry

    def watch_routers(self, group: RouterGroup) -> None:
        """Counts of the links to several routers."""
        CollectorOf(
            self._registry,
            lambda: (
                table.REATTACHED_REQUESTS.collected(group.num_reattached),
                table.ORPHANED_REQUESTS.collected(group.num_given_up),
                table.PARKED_REQUESTS.collected(group.num_parked),
            ),
        )

    def watch_cells(
        self, num_requests: Mapping[tuple[str, ...], int], round_trips: Callable[[], Mapping[tuple[str, ...], float]]
    ) -> None:
        """Show what cells have got, and how far they are, in seconds."""
        CollectorOf(
            self._registry,
            lambda: (table.CELL_REQUESTS.collected(num_requests), table.CELL_ROUND_TRIP.collected(round_trips())),
        )

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
        table.RESUMABLE_RESPONSES.watch(self._registry, num_kept)
        table.UNATTENDED_RESPONSES.watch(self._registry, num_unattended)
        table.RESUME_BYTES.watch(self._registry, num_bytes)

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

    def seconds_of(self, request_id: str) -> float | None:
        """How long the answer to a request took here, from its submission; None: it is not among the latest ones."""
        return next((seconds for name, seconds in reversed(self._latest) if name == request_id), None)

    def on_answer(
        self,
        operation: str,
        model: str,
        answer: EdgeAnswer,
        num_prompt_tokens: int,
        num_events: int,
        request_id: str = "",
    ) -> None:
        """An answer that was submitted is over, well or not. `model` is the served model's name, `request_id` that of
        the only request to the router, or ""."""
        now = time.monotonic()
        self._latest.append((request_id, now - answer.started_at))
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
