"""Runs one seed: periods of faults, each followed by a period without faults in which everything must end."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Iterable

from lab.dst.checker import Checker, Violation
from lab.dst.checkers import CHECKERS, LIMIT_CHECKERS, Checks
from lab.dst.environment import MAX_TRACE
from lab.dst.faults import Faults
from lab.dst.scenario import has_limits
from lab.dst.trace import history_lines, scenario_lines
from lab.dst.world import World

MAX_QUIESCING_SECONDS = 60.0
SETTLE_SECONDS = 1.0
FORGET_SECONDS = 120.0
"""Longer than any router keeps blocks in its prefix index that it only expects to be cached."""
NUM_HISTORY_LINES = 25
"""How much history a failure shows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    seed: int
    invariant: str
    detail: str
    num_events: int
    """Events that routers had handled, including the one that broke the invariant."""
    at_seconds: float
    """Virtual time since the start."""
    history: tuple[str, ...]
    with_limits: bool = False
    """True when it was told to have limits, which not all seeds have by themselves."""

    @property
    def replay(self) -> str:
        return f"kvloom-lab dst --seed {self.seed}" + (" --limits" if self.with_limits else "")


@dataclasses.dataclass(frozen=True, slots=True)
class SeedResult:
    seed: int
    digest: str
    num_events: int
    num_requests: int
    num_tokens: int
    """Tokens that clients read."""
    faults: dict[str, int]
    virtual_seconds: float
    cpu_seconds: float
    failure: Failure | None


def run_seed(
    seed: int,
    checkers: Iterable[type[Checker]] | None = None,
    history: list[str] | None = None,
    *,
    with_limits: bool | None = None,
) -> SeedResult:
    """`checkers`: None for all; those that do not fit a seed with limits are left out there. `with_limits`: whether
    tenants have limits, which changes the seed's history; None: as the seed says.
    Never raises for an error of the router or of the simulation: the result has a failure instead. The remembered
    history, one line per event, is appended to `history`."""
    has_any_limits = has_limits(seed) if with_limits is None else with_limits
    fitting = LIMIT_CHECKERS if has_any_limits else CHECKERS
    checkers = fitting if checkers is None else [checker for checker in checkers if checker in fitting]
    world = World(seed, Checks(checkers), with_limits=has_any_limits)
    begin_seconds, begin_cpu = world.env.timeline.now, time.process_time()
    failure: Failure | None = None
    try:
        _run(world)
    except Violation as violation:
        failure = _failure(world, violation.invariant, violation.detail, begin_seconds, with_limits=bool(with_limits))
    except Exception:  # a broken core may send something that the simulation cannot handle
        detail = traceback.format_exc(limit=-4)
        failure = _failure(world, "simulation", detail, begin_seconds, with_limits=bool(with_limits))
    finally:
        world.close()
    if history is not None:
        history += [*scenario_lines(world.env.scenario), *history_lines(world.env.trace, MAX_TRACE)]
    return SeedResult(
        seed=seed,
        digest=world.env.digest,
        num_events=world.env.num_events,
        num_requests=world.traffic.num_requests,
        num_tokens=world.env.num_delivered_tokens,
        faults={**world.env.faults, **({} if world.limits is None else world.limits.faults)},
        virtual_seconds=world.env.timeline.now - begin_seconds,
        cpu_seconds=time.process_time() - begin_cpu,
        failure=failure,
    )


def _run(world: World) -> None:
    """Raises Violation."""
    env = world.env
    world.start()
    num_touches = 0
    for _ in range(env.scenario.num_epochs):
        env.is_calm = False
        world.traffic.start()
        Faults(world).start()
        if env.limits is not None:
            env.limits.start_faults()
        env.timeline.run_until(env.timeline.now + env.scenario.chaos_seconds)
        _quiesce(world)
        for shard in world.shards:
            num_touches += 1
            shard.touch_cache(num_touches)
        env.timeline.run_until(env.timeline.now + SETTLE_SECONDS)
        env.timeline.run_until(env.timeline.now + FORGET_SECONDS)
        env.checks.on_quiescence(world)


def _quiesce(world: World) -> None:
    """Stop all faults and wait until everything that is in flight has ended."""
    env = world.env
    env.is_calm = True
    world.repair()
    end = env.timeline.now + MAX_QUIESCING_SECONDS
    while not world.is_quiescent():
        if env.timeline.now > end:
            raise Violation(
                "reaches_quiescence", f"after {MAX_QUIESCING_SECONDS:g} s without faults {world.describe_activity()}"
            )
        env.timeline.run_until(env.timeline.now + SETTLE_SECONDS)


def _failure(world: World, invariant: str, detail: str, begin_seconds: float, *, with_limits: bool) -> Failure:
    return Failure(
        seed=world.env.scenario.seed,
        invariant=invariant,
        detail=detail,
        num_events=world.env.num_events,
        at_seconds=world.env.timeline.now - begin_seconds,
        history=(*scenario_lines(world.env.scenario), *history_lines(world.env.trace, NUM_HISTORY_LINES)),
        with_limits=with_limits,
    )
