"""One seed from beginning to end, and what is told of it."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Iterable

from tools.dst.checkers import CHECKERS, Checks
from tools.dst.checkers.base import Checker
from tools.dst.trace import history_lines, scenario_lines
from tools.dst.violation import Violation
from tools.dst.world import MAX_TRACE, World

NUM_LINES = 25
"""Of history, with a failure."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    seed: int
    invariant: str
    detail: str
    num_events: int
    """Events that routers had handled, the one that broke it included."""
    at_seconds: float
    """Of virtual time."""
    history: tuple[str, ...]

    @property
    def replay(self) -> str:
        return f"kvloom dst --seed {self.seed}"


@dataclasses.dataclass(frozen=True, slots=True)
class SeedResult:
    seed: int
    digest: str
    num_events: int
    num_requests: int
    num_tokens: int
    """Read by clients."""
    faults: dict[str, int]
    virtual_seconds: float
    cpu_seconds: float
    failure: Failure | None


def run_seed(seed: int, checkers: Iterable[type[Checker]] = CHECKERS, history: list[str] | None = None) -> SeedResult:
    """Never raises for what the router or the simulation does wrong: that is a failure of the result. `history`, where
    it is given, gets all that is remembered of what happened."""
    world = World(seed, Checks(checkers))
    begin_seconds, begin_cpu = world.timeline.now, time.process_time()
    failure: Failure | None = None
    try:
        world.run()
    except Violation as violation:
        failure = _failure(world, violation.invariant, violation.detail, begin_seconds)
    except Exception:  # what a broken core sends may be beyond what the simulation understands
        failure = _failure(world, "simulation", traceback.format_exc(limit=-4), begin_seconds)
    if history is not None:
        history += [*scenario_lines(world.scenario), *history_lines(world.trace, MAX_TRACE)]
    return SeedResult(
        seed=seed,
        digest=world.digest,
        num_events=world.num_events,
        num_requests=world.traffic.num_requests,
        num_tokens=world.num_delivered_tokens,
        faults=dict(world.faults),
        virtual_seconds=world.timeline.now - begin_seconds,
        cpu_seconds=time.process_time() - begin_cpu,
        failure=failure,
    )


def _failure(world: World, invariant: str, detail: str, begin_seconds: float) -> Failure:
    return Failure(
        seed=world.scenario.seed,
        invariant=invariant,
        detail=detail,
        num_events=world.num_events,
        at_seconds=world.timeline.now - begin_seconds,
        history=(*scenario_lines(world.scenario), *history_lines(world.trace, NUM_LINES)),
    )
