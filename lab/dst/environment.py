"""Environment holds what all nodes of one simulation share: virtual time, the source of randomness, the checkers and
the record of what happened."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

import xxhash

from lab.dst.checker import Hooks
from lab.dst.scenario import draw_scenario
from lab.dst.tenancy.sim_limits import SimLimits
from lab.dst.timeline import Timeline
from router.core.actions import Action
from router.core.events import Event, StepArrived

MAX_TRACE = 4000

TraceEntry = tuple[float, str, Event | str, Sequence[Action]]
"""The time, the process, what it handled or reports, and what followed."""


class Environment:
    """Every node takes its random numbers from `rng`, in an order that depends on nothing but the seed."""

    def __init__(self, seed: int, checks: Hooks, *, with_limits: bool = False) -> None:
        self.rng = random.Random(seed)
        self.scenario = draw_scenario(seed, self.rng)
        self.checks = checks
        self.timeline = Timeline(start=100.0)
        self.limits: SimLimits | None = None
        """None: no tenant has limits."""
        if with_limits:
            self.limits = SimLimits(self.timeline, seed, self.scenario.tenants, self.scenario.num_routers)
        self.is_calm = False
        """No fault strikes, and no new request is sent."""
        self.num_events = 0
        self.num_delivered_tokens = 0
        self.faults: Counter[str] = Counter()
        self.handoffs: dict[bytes, Callable[[], bool]] = {}
        """By hand-off that no shard has used: whether its KV can be fetched now."""
        self.trace: deque[TraceEntry] = deque(maxlen=MAX_TRACE)
        self._digest = xxhash.xxh3_64()

    @property
    def digest(self) -> str:
        """A hash of the history. Two runs of one seed must have the same."""
        return self._digest.hexdigest()

    def chance(self, kind: str) -> bool:
        """Draw whether a fault of this kind strikes at this opportunity."""
        probability = 0.0 if self.is_calm else self.scenario.rates.get(kind, 0.0)
        if probability and self.rng.random() < probability:
            self.faults[kind] += 1
            return True
        return False

    def count_fault(self, kind: str) -> None:
        self.faults[kind] += 1

    def record_note(self, process: str, text: str) -> None:
        """For those who read the history of a failure."""
        self.trace.append((self.timeline.now, process, text, ()))

    def record_event(self, router: str, event: Event) -> None:
        self.num_events += 1
        self.trace.append((self.timeline.now, router, event, ()))
        self._digest.update(f"{self.timeline.now!r}{router}{type(event).__name__}".encode())
        if isinstance(event, StepArrived):
            self._digest.update(repr(event.step.token_ids).encode())

    def record_actions(self, actions: Sequence[Action]) -> None:
        time, router, event, _ = self.trace[-1]
        self.trace[-1] = (time, router, event, actions)
        self._digest.update(f"{len(actions)}".encode())
