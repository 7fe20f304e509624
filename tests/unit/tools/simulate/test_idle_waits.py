"""Requests that wait in a router beside an idle shard are counted."""

from __future__ import annotations

import pytest

from router.core.dispatch.idle_bound import MAX_IDLE_WAIT_SECONDS
from router.core.dispatch.replacement import Replacements
from router.core.fleet.fleet import Shard
from router.core.live import LiveRequest
from router.core.placement.placer import Placer
from router.core.placement.policy import Candidate
from tests.fakes.sim_calls import ListedWorkload
from tools.simulate.fleet.profile import PROFILES
from tools.simulate.idle_waits import IdleWaits
from tools.simulate.workload import Call
from tools.simulate.world import FleetOptions, simulate

BOUND = MAX_IDLE_WAIT_SECONDS
PREFILL = 3.0


def waits_of(num_shards: int) -> IdleWaits:
    waits = IdleWaits()
    for index in range(num_shards):
        waits.note_shard(index, 0.0, is_idle=True)
    return waits


def test_only_time_beside_an_idle_shard_counts() -> None:
    """A request that waits while all shards work waits for its turn, however long."""
    waits = waits_of(2)
    for index in range(2):
        waits.note_shard(index, 1.0, is_idle=False)
    waits.note_arrival("a", 1.0)
    waits.note_begin("a", PREFILL, 100.0)
    assert waits.num_too_long == 0
    waits.note_arrival("b", 100.0)
    waits.note_shard(0, 100.0, is_idle=True)
    waits.note_begin("b", PREFILL, 100.0 + BOUND + PREFILL)
    assert waits.num_too_long == 0
    waits.note_arrival("c", 110.0)
    waits.note_begin("c", PREFILL, 110.1 + BOUND + PREFILL)
    assert waits.num_too_long == 1


def test_an_idle_time_that_has_passed_counts() -> None:
    """It could have begun then, even if all shards work when it does; idle times that do not touch do not add up."""
    waits = waits_of(1)
    waits.note_arrival("a", 1.0)
    waits.note_shard(0, 7.0, is_idle=False)
    waits.note_arrival("b", 8.0)
    waits.note_shard(0, 20.0, is_idle=True)
    waits.note_shard(0, 24.0, is_idle=False)
    waits.note_shard(0, 25.0, is_idle=True)
    waits.note_shard(0, 29.0, is_idle=False)
    waits.note_begin("b", PREFILL, 50.0)
    assert waits.num_too_long == 0
    waits.note_begin("a", PREFILL, 50.0)
    assert waits.num_too_long == 1
    waits.note_begin("a", PREFILL, 90.0)
    assert waits.num_too_long == 1  # it had begun
    waits.note_arrival("c", 50.0)
    waits.note_end("c")
    waits.note_shard(0, 50.0, is_idle=True)
    waits.note_begin("c", PREFILL, 90.0)
    assert waits.num_too_long == 1


def test_a_router_that_lets_requests_wait_beside_idle_shards_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is of the modelled shards, not of the router's beliefs."""
    calls = [(0.1 * number, Call(number, 20_000, 5, (1000 * number, 1000 * number + 1))) for number in range(12)]
    workload = ListedWorkload(calls, 512)
    options = FleetOptions(profile=PROFILES["8b"], num_shards=3)
    assert simulate(workload, options).num_waited_beside_idle == 0

    def always_the_first(placer: Placer, shards: list[Shard], live: LiveRequest, now: float) -> tuple[Shard, Candidate]:
        return shards[0], placer.candidate(live, shards[0], now)

    monkeypatch.setattr(Placer, "pick", always_the_first)
    monkeypatch.setattr(Placer, "pick_among", always_the_first)
    monkeypatch.setattr(Replacements, "idle_instead", lambda *_: None)
    assert simulate(workload, options).num_waited_beside_idle > 3
