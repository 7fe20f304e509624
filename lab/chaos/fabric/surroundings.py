"""The faults of what processes depend on: each strikes when its context is entered, and is undone when it is left.
`STRIKES` has all faults of that form."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kvloom_common.models.configured import configured_models
from lab.chaos.attackers.neighbour import AttackOrder, attack
from lab.chaos.attackers.targets import Targets
from lab.chaos.fabric import clocks, redis_faults
from lab.chaos.fabric.cluster import Cluster
from lab.chaos.fabric.faults import Fault, FaultKind
from lab.chaos.fabric.model_faults import sleep_model, unload_model

_NUM_GUESSED_USERS: Final = 12
_ROLES: Final = ("shard", "router", "edge", "safety")

Strike = Callable[[Cluster, Fault, random.Random], AbstractAsyncContextManager[str]]
"""Yields the name of what was struck. Entering it raises StrikeSkippedError if the fault cannot strike now."""


def unavailable(kind: FaultKind) -> str:
    """Why this kind cannot strike on this machine; "" if it can."""
    if kind is FaultKind.CLOCK_JUMP and clocks.library() is None:
        return "libfaketime is not installed (apt-get install libfaketime)"
    return ""


@contextlib.asynccontextmanager
async def disk_full(cluster: Cluster, _fault: Fault, _rng: random.Random) -> AsyncIterator[str]:
    """By RLIMIT_FSIZE instead of a full file system, which would need root: every write to a file fails, in this
    process as well, which writes the logs. Python turns the signal that comes with it into an OSError; Redis, which it
    would kill, writes nothing and is left out."""
    pids = [0, *(status.pid for status in cluster.statuses if status.pid is not None and status.role != "redis")]
    with _limited(pids, resource.RLIMIT_FSIZE, lambda _pid: 0):
        yield "all files"


@contextlib.asynccontextmanager
async def emfile(cluster: Cluster, fault: Fault, _rng: random.Random) -> AsyncIterator[str]:
    """The limit is the lowest descriptor that is free, so that none can be opened until another is closed."""
    running = [status for status in cluster.statuses if status.role in _ROLES and status.pid]
    status = running[int(fault.choice * len(running))]
    with _limited([status.pid or 0], resource.RLIMIT_NOFILE, _first_free_descriptor):
        yield status.name


@contextlib.contextmanager
def _limited(pids: Sequence[int], what: int, limit_of: Callable[[int], int]) -> Iterator[None]:
    """Lower a soft limit of running processes. Processes that have died meanwhile are left out."""
    before: dict[int, tuple[int, int]] = {}
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                soft, hard = resource.prlimit(pid, what)
                resource.prlimit(pid, what, (limit_of(pid), hard))
                before[pid] = (soft, hard)
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, what, limits)


def _first_free_descriptor(pid: int) -> int:
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in range(len(used) + 1) if number not in used)


@contextlib.asynccontextmanager
async def hostile_neighbour(cluster: Cluster, fault: Fault, rng: random.Random) -> AsyncIterator[str]:
    order = AttackOrder(targets_of(cluster), rng.getrandbits(32), fault.duration_seconds, list(cluster.attacks))
    attacking = asyncio.create_task(attack(order), name="hostile neighbour")
    try:
        yield "every port"
        cluster.attack_answers.update(await attacking)
    finally:
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)


def targets_of(cluster: Cluster) -> Targets:
    """Everything that listens. Attackers reach the ports themselves, not through the proxies of the users."""
    config = cluster.config
    inner = {
        address
        for status in cluster.statuses
        for address in (status.internal_address, status.peer_address, status.metrics_address, status.address)
        if status.role != "redis" and ":" in address
    }
    public = {cluster.http_address, cluster.router_address}
    return Targets(
        http_address=cluster.http_address,
        router_address=cluster.router_address,
        model=configured_models(config)[0].name,
        inner_addresses=sorted(inner - public),
        redis_socket=unquote(urlsplit(config.redis.url).path),
        user_seed=cluster.user_seed,
        num_users=_NUM_GUESSED_USERS,
        key=cluster.attackers_key,
    )


STRIKES: Final[dict[FaultKind, Strike]] = {
    FaultKind.UNLOAD_MODEL: unload_model,
    FaultKind.SLEEP_MODEL: sleep_model,
    FaultKind.DISK_FULL: disk_full,
    FaultKind.EMFILE: emfile,
    FaultKind.BAD_RECORDS: redis_faults.bad_records,
    FaultKind.REDIS_FULL: redis_faults.redis_full,
    FaultKind.REDIS_TAKEOVER: redis_faults.redis_takeover,
    FaultKind.CLOCK_JUMP: clocks.clock_jump,
    FaultKind.HOSTILE_NEIGHBOUR: hostile_neighbour,
}
