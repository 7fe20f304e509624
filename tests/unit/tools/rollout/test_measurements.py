"""What routers have counted, as the judgement of a rollout sees it."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry

from kvloom_common.metrics.exposition import exposition_of, samples_in
from kvloom_common.metrics.series import CounterFamily, HistogramFamily
from tools.supervisor.rollout.judge import Counts
from tools.supervisor.rollout.measurements import REQUESTS, TTFT, Increments, Reading, counts_of, reading_of


class Router:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = CounterFamily(REQUESTS, "requests", ("model", "outcome", "error_type"), self._registry)
        self.ttft = HistogramFamily(TTFT, "seconds", ("model",), (0.1, 1.0), self._registry)

    def reading(self) -> Reading:
        return reading_of(samples_in(exposition_of(self._registry, {REQUESTS, TTFT})), ("m", "m@2"))


def test_only_faults_of_the_fabric_are_errors_of_a_version() -> None:
    """A caller who sends nonsense, or goes away, says nothing about the version that they got."""
    router = Router()
    for outcome, error_type, count in (
        ("stop", "", 10),
        ("cancelled", "", 5),
        ("error", "engine_failed", 2),
        ("error", "queue_full", 1),
        ("error", "context_length_exceeded", 7),
        ("error", "rate_limited", 7),
        ("error", "something_new", 1),
    ):
        router.requests.labels("m@2", outcome, error_type).total += count
    router.requests.labels("other", "error", "engine_failed").total += 100
    for seconds in (0.05, 0.07, 0.5, 3.0):
        router.ttft.labels("m@2").observe(seconds)
    reading = router.reading()
    assert counts_of(reading, "m@2") == Counts(14, 4, (0.1, 1.0, math.inf), (2, 1, 1))
    assert counts_of(reading, "m") == Counts()
    assert not [series for series in reading if ("model", "other") in series[1]]


def test_a_step_has_what_has_come_since_it_began_at_all_routers() -> None:
    """Routers restart, and new ones have counted for days before the rollout meets them."""
    first, second, increments = Router(), Router(), Increments()
    first.requests.labels("m", "stop", "").total = 1000
    increments.add("first", first.reading())
    first.requests.labels("m", "stop", "").total += 3
    increments.add("first", first.reading())
    step_begins = dict(increments.total)
    second.requests.labels("m", "stop", "").total = 500
    increments.add("second", second.reading())
    restarted = Router()
    restarted.requests.labels("m", "stop", "").total = 2
    increments.add("first again", restarted.reading())
    restarted.requests.labels("m", "stop", "").total += 4
    second.requests.labels("m", "error", "internal").total += 1
    increments.add("first again", restarted.reading())
    increments.add("second", second.reading())
    assert counts_of(increments.since(step_begins), "m") == Counts(5, 1)
    assert counts_of(increments.total, "m") == Counts(8, 1)
