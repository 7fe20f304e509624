"""The faults and their times, as a pure function of the seed."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Sequence
from typing import Final


class FaultKind(enum.StrEnum):
    """`VERB-PART` for faults of processes and connections."""

    KILL_SHARD = "kill-shard"
    KILL_ROUTER = "kill-router"
    KILL_EDGE = "kill-edge"
    KILL_SAFETY = "kill-safety"
    KILL_REDIS = "kill-redis"
    KILL_CONTROL = "kill-control"
    KILL_ORCHESTRATOR = "kill-orchestrator"
    HANG_SHARD = "hang-shard"
    HANG_ROUTER = "hang-router"
    HANG_EDGE = "hang-edge"
    HANG_SAFETY = "hang-safety"
    HANG_REDIS = "hang-redis"
    HANG_CONTROL = "hang-control"
    HANG_ORCHESTRATOR = "hang-orchestrator"
    STOP_SHARD = "stop-shard"
    STOP_ROUTER = "stop-router"
    STOP_EDGE = "stop-edge"
    RESTART_SHARD = "restart-shard"
    """A planned restart as by `kvloom restart`, which no client may notice."""
    RESTART_ROUTER = "restart-router"
    RESTART_EDGE = "restart-edge"
    UNLOAD_MODEL = "unload-model"
    """Unloads a model as `kvloom models unload` does, which no answer that runs may notice; then it is loaded again."""
    SLEEP_MODEL = "sleep-model"
    """Lets a model sleep as `kvloom models sleep` does, which no answer that runs may notice; then it is woken."""
    RESET_CLIENTS = "reset-clients"
    """The connections between clients and an edge."""
    STALL_CLIENTS = "stall-clients"
    RESET_LINK = "reset-link"
    """The connections between the routers and a shard."""
    STALL_LINK = "stall-link"
    DISK_FULL = "disk-full"
    EMFILE = "emfile"
    BAD_RECORDS = "bad-records"
    REDIS_FULL = "redis-full"
    REDIS_TAKEOVER = "redis-takeover"
    CLOCK_JUMP = "clock-jump"
    HOSTILE_NEIGHBOUR = "hostile-neighbour"

    @property
    def verb(self) -> str:
        """The verb for what happens to `part`; "surround" for faults of what the processes depend on."""
        return "surround" if self in SURROUNDINGS else self.value.partition("-")[0]

    @property
    def part(self) -> str:
        """ "shard", "router", "edge", "safety", "redis", "control", "orchestrator", "clients", "link" or
        "model"; of a fault of the surroundings "redis" or its own name, which explains no failure."""
        if self in SURROUNDINGS:
            return "redis" if self in (FaultKind.REDIS_FULL, FaultKind.REDIS_TAKEOVER) else self.value
        return self.value.partition("-")[2]

    @property
    def story(self) -> str:
        """Says what it does, in one line."""
        return _STORIES.get(self) or _STORIES_BY_VERB[self.verb].format(_PARTS.get(self.part, f"a {self.part}"))


SURROUNDINGS: Final = frozenset(
    {
        FaultKind.DISK_FULL,
        FaultKind.EMFILE,
        FaultKind.BAD_RECORDS,
        FaultKind.REDIS_FULL,
        FaultKind.REDIS_TAKEOVER,
        FaultKind.CLOCK_JUMP,
        FaultKind.HOSTILE_NEIGHBOUR,
    }
)
"""Faults of what the processes depend on. All of them last for a while, and are undone."""
_PARTS: Final = {
    "edge": "an edge",
    "safety": "the safety service",
    "redis": "Redis",
    "control": "the control service",
    "orchestrator": "the orchestrator",
    "clients": "the connections between clients and an edge",
    "link": "the connections between the routers and a shard",
}
_STORIES_BY_VERB: Final = {
    "kill": "SIGKILL to {}",
    "hang": "SIGSTOP to {}, SIGCONT some seconds later",
    "stop": "SIGTERM to {} from outside",
    "restart": "a planned restart of {}",
    "reset": "{} are reset",
    "stall": "{} transfer nothing for some seconds",
}
_STORIES: Final = {
    FaultKind.UNLOAD_MODEL: "a model is unloaded while its answers run, and loaded again some seconds later",
    FaultKind.SLEEP_MODEL: "a model is put to sleep while its answers run, and woken some seconds later",
    FaultKind.DISK_FULL: "no process of the fabric can write to a file, logs included",
    FaultKind.EMFILE: "a shard, router, edge or safety service can open no more files and sockets",
    FaultKind.BAD_RECORDS: "garbage, foreign, stale and mistyped records in the registry",
    FaultKind.REDIS_FULL: "Redis reaches its memory limit and refuses writes",
    FaultKind.REDIS_TAKEOVER: "another server, with other data, answers at the address of Redis, then Redis is back",
    FaultKind.CLOCK_JUMP: "the wall clock of a process jumps by hours, then back",
    FaultKind.HOSTILE_NEIGHBOUR: "a process attacks every port over HTTP, gRPC and the Redis protocol",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    at_seconds: float
    """Time since the load began."""
    kind: FaultKind
    choice: float
    """Chooses the part of its kind that it strikes: 0 is the first one, 1 is just past the last."""
    duration_seconds: float = 0.0
    """The duration of a hang or stall, or for how long a model is away."""


SETTLE_SECONDS: Final = 3.0
"""How long the other processes may take to find a part that was restored."""


@dataclasses.dataclass(slots=True)
class Disturbance:
    """A fault that struck. Times are those of the monotonic clock."""

    kind: FaultKind
    target: str
    """The name of the process, of the shard of a link, of an edge proxy, or of the model."""
    began_at: float
    ended_at: float | None = None
    """When the part was restored. None means not yet."""

    def is_felt(self, begin: float, end: float) -> bool:
        """True when it was in effect at any time between `begin` and `end`."""
        return self.began_at <= end and (self.ended_at is None or begin <= self.ended_at + SETTLE_SECONDS)


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """One request for a model that is away. Times are those of the monotonic clock."""

    kind: FaultKind
    """Why the model is away."""
    model: str
    began_at: float
    ended_at: float
    answer: str
    """The HTTP status and the code of the error."""


WARM_UP_SECONDS: Final = 4.0
COOL_DOWN_SECONDS: Final = 6.0
"""The time without faults at the end, in which open answers can end."""
MIN_PAUSE_SECONDS: Final = 2.5
MAX_PAUSE_SECONDS: Final = 6.0
OVERLAP_SHARE: Final = 0.12
"""The share of faults that strike while the previous one is still in effect."""
_MAX_OVERLAP_SECONDS: Final = 0.8
_MIN_HANG_SECONDS: Final = 0.5
_MAX_HANG_SECONDS: Final = 4.0
LONG_HANG_SHARE: Final = 0.35
_LONG_HANG_SECONDS: Final = {"shard": (6.0, 9.0), "link": (6.0, 9.0), "router": (15.5, 18.0)}
"""Longer than a process may be silent before the others continue without it (docs/operate/reliability.md)."""
_LASTING: Final = frozenset({"hang", "stall", "surround", "unload", "sleep"})
_NEIGHBOUR_SECONDS: Final = (6.0, 12.0)
"""Its slower attacks take some seconds."""


def pick(names: Sequence[str], choice: float) -> str:
    """`choice` as in `Fault`."""
    return names[min(int(choice * len(names)), len(names) - 1)]


def plan_faults(
    seed: int, duration_seconds: float, kinds: Sequence[FaultKind], long_hang_share: float = LONG_HANG_SHARE
) -> list[Fault]:
    """Returns the faults in order of time. Every kind strikes once before any strikes again. `long_hang_share` is the
    share of long ones among the hangs and stalls of parts that have a long duration."""
    rng = random.Random(f"faults of {seed}")
    faults: list[Fault] = []
    deck: list[FaultKind] = []
    at_seconds = WARM_UP_SECONDS
    end_seconds = duration_seconds - COOL_DOWN_SECONDS
    while kinds and at_seconds < end_seconds:
        if not deck:
            deck = sorted(set(kinds))
            rng.shuffle(deck)
        kind = deck.pop()
        hang_seconds = _draw_hang_seconds(rng, kind, long_hang_share) if kind.verb in _LASTING else 0.0
        if at_seconds + hang_seconds > end_seconds:
            break
        faults.append(Fault(round(at_seconds, 3), kind, rng.random(), round(hang_seconds, 3)))
        if rng.random() < OVERLAP_SHARE:
            at_seconds += rng.uniform(0.0, _MAX_OVERLAP_SECONDS)
        else:
            at_seconds += hang_seconds + rng.uniform(MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS)
    return faults


def _draw_hang_seconds(rng: random.Random, kind: FaultKind, long_hang_share: float) -> float:
    if kind is FaultKind.HOSTILE_NEIGHBOUR:
        return rng.uniform(*_NEIGHBOUR_SECONDS)
    if rng.random() < long_hang_share and kind.part in _LONG_HANG_SECONDS:
        return rng.uniform(*_LONG_HANG_SECONDS[kind.part])
    return rng.uniform(_MIN_HANG_SECONDS, _MAX_HANG_SECONDS)
