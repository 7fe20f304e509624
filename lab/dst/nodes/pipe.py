"""One direction of a stream between two processes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from lab.dst.timeline import Timeline


class Pipe:
    """Delivers messages in order, each after a latency of its own. While the pipe is stalled, nothing arrives and none
    is lost. Once it is cut, messages in flight are lost."""

    def __init__(
        self, timeline: Timeline, rng: random.Random, deliver: Callable[[Any], None], latency_seconds: float
    ) -> None:
        self._timeline = timeline
        self._rng = rng
        self._deliver = deliver
        self._latency_seconds = latency_seconds
        self._in_flight: deque[Any] = deque()
        self._last_arrival = 0.0
        self._num_stalls = 0
        self._num_due = 0
        self.is_cut = False

    def send(self, message: Any) -> None:
        if self.is_cut:
            return
        self._in_flight.append(message)
        self._schedule_one()

    def stall(self) -> None:
        """Stop delivery. Stalls nest: the pipe resumes after as many calls of `heal`."""
        self._num_stalls += 1

    def heal(self) -> None:
        self._num_stalls -= 1
        if not self._num_stalls:
            due, self._num_due = self._num_due, 0
            for _ in range(due):
                self._schedule_one()

    def cut(self) -> None:
        self.is_cut = True
        self._in_flight.clear()

    def _schedule_one(self) -> None:
        latency = self._latency_seconds * (0.2 + self._rng.expovariate(1.0))
        self._last_arrival = max(self._last_arrival, self._timeline.now + latency)
        self._timeline.at(self._last_arrival, self._arrive)

    def _arrive(self) -> None:
        if self.is_cut:
            return
        if self._num_stalls:
            self._num_due += 1
            return
        self._deliver(self._in_flight.popleft())
