"""Bugs planted in the router core, at least one for each checker: mutants that `kvloom-lab dst` must catch.

Each is a mistake that a change could make: a forgotten line, an inverted condition, a step too early. Those in `found`
are real: they were in the core until the simulation found them."""

from tests.lab.dst.planted_bugs import (
    answers,
    classes,
    dispatch,
    fairness,
    found,
    handoffs,
    kv_shares,
    models,
    notices,
    objectives,
    overload,
    registry_records,
    result_cache,
    rollouts,
    shard_health,
    surroundings,
)
from tests.lab.dst.planted_bugs.registry import PLANTED_BUGS, PlantedBug

__all__ = [
    "PLANTED_BUGS",
    "PlantedBug",
    "answers",
    "classes",
    "dispatch",
    "fairness",
    "found",
    "handoffs",
    "kv_shares",
    "models",
    "notices",
    "objectives",
    "overload",
    "registry_records",
    "result_cache",
    "rollouts",
    "shard_health",
    "surroundings",
]
