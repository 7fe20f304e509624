"""The metrics of resumable answers: they are updated once for each answer, never for each response."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge


class ResumeMetrics:
    """There is one per router."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry

        def counter(name: str, text: str) -> Counter:
            return Counter(f"kvloom_router_{name}", text, registry=registry)

        self._resumed = counter("resumed_streams", "Generate streams taken up again by their client.")
        self._replayed = counter("replayed_responses", "Responses that were there before their reader came.")
        self._expired = counter("expired_answers", "Answers cancelled because no client came back.")
        self._evicted = counter("evicted_answers", "Answers whose responses were forgotten to keep others'.")
        self._unclaimed = counter(
            "unclaimed_responses",
            "Responses of expired answers that came after their client had left: work for nobody.",
        )

    def watch(
        self, num_kept: Callable[[], float], num_unattended: Callable[[], float], num_bytes: Callable[[], float]
    ) -> None:
        for name, text, function in (
            ("resumable_answers", "Answers that can be resumed.", num_kept),
            ("unattended_answers", "Of those, running ones that no client reads.", num_unattended),
            ("resume_bytes", "Held for resumable answers.", num_bytes),
        ):
            Gauge(f"kvloom_router_{name}", text, registry=self._registry).set_function(function)

    def on_resumed(self, num_replayed: int) -> None:
        self._resumed.inc()
        self._replayed.inc(num_replayed)

    def on_expired(self, num_unclaimed: int) -> None:
        self._expired.inc()
        self._unclaimed.inc(num_unclaimed)

    def on_evicted(self) -> None:
        self._evicted.inc()
