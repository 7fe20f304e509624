"""The schedule of `kvloom chaos`: the seed decides it, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from tools.chaos.checker import Finding, Verdict
from tools.chaos.clients.questions import Door, Errand, Manner, Question, draw_errand, draw_question
from tools.chaos.clients.transcript import End, Transcript
from tools.chaos.injection.excuses import SETTLE_SECONDS, Disturbance, Fleet, is_excused
from tools.chaos.injection.faults import COOL_DOWN_SECONDS, WARM_UP_SECONDS, FaultKind, plan_faults

FLEET = Fleet(num_edges=2, num_routers=1, num_shards=2, max_attempts=3)
QUESTION = Question("Tell me about tea.", True, 10, 1.0, seed=1)


def test_a_seed_gives_the_same_faults_every_time():
    """Else a run that failed could not be run again."""
    assert plan_faults(7, 600.0, list(FaultKind)) == plan_faults(7, 600.0, list(FaultKind))
    assert plan_faults(7, 600.0, list(FaultKind)) != plan_faults(8, 600.0, list(FaultKind))
    assert plan_faults(7, 600.0, list(reversed(FaultKind))) == plan_faults(7, 600.0, list(FaultKind))


def test_every_kind_strikes_and_the_run_begins_and_ends_in_peace():
    """A kind that never comes proves nothing; answers need time to end before the reckoning."""
    faults = plan_faults(3, 600.0, list(FaultKind))
    assert {fault.kind for fault in faults} == set(FaultKind)
    assert faults[0].at_seconds >= WARM_UP_SECONDS
    assert faults[-1].at_seconds < 600.0 - COOL_DOWN_SECONDS
    assert [fault.at_seconds for fault in faults] == sorted(fault.at_seconds for fault in faults)


def test_most_faults_leave_time_to_recover_and_some_do_not():
    """Both are to be seen: a fabric that recovers, and one that is struck again while it does."""
    faults = plan_faults(5, 3600.0, list(FaultKind))
    pauses = [
        later.at_seconds - fault.at_seconds - fault.duration_seconds for fault, later in itertools.pairwise(faults)
    ]
    overlapping = sum(pause < 1.0 for pause in pauses) / len(pauses)
    assert 0.03 < overlapping < 0.25


def test_no_kinds_no_faults():
    """A soak is a run without any."""
    assert plan_faults(1, 600.0, []) == []


def test_users_ask_in_every_manner_at_every_door():
    """What is not asked is not checked."""
    rng = random.Random(1)
    errands = [draw_errand(rng, draw_question(rng, [" a", " b", " c", " d", " e"], (8, 90))) for _ in range(2000)]
    assert {errand.manner for errand in errands} == set(Manner)
    assert {errand.door for errand in errands} == set(Door)
    assert {errand.question.n for errand in errands} == {1, 2}
    assert any(errand.question.stop for errand in errands)
    assert any(errand.question.temperature == 0.0 for errand in errands)


def ended(end: End, code: str = "") -> Transcript:
    seen = Transcript.begin(1, now=100.0)
    seen.end, seen.code, seen.ended_at = end, code, 105.0
    return seen


def excused(
    end: End,
    code: str,
    *kinds: FaultKind,
    manner: Manner = Manner.PLAIN,
    began_at: float = 101.0,
    door: Door = Door.CHAT,
    fleet: Fleet = FLEET,
) -> bool:
    verdict = {End.BROKEN: Verdict.BROKEN, End.REFUSED: Verdict.REFUSED}.get(end, Verdict.FAILED)
    disturbances = [Disturbance(kind, f"{kind}-{i}", began_at, began_at + 1) for i, kind in enumerate(kinds)]
    return is_excused(Errand(QUESTION, door, manner), ended(end, code), Finding(verdict), disturbances, fleet)


@pytest.mark.parametrize(
    ("end", "code", "kind"),
    [
        (End.BROKEN, "", FaultKind.KILL_EDGE),
        (End.BROKEN, "", FaultKind.RESET_CLIENTS),
        (End.ERROR, "router_unavailable", FaultKind.KILL_ROUTER),
        (End.REFUSED, "safety_unavailable", FaultKind.KILL_SAFETY),
        (End.REFUSED, "draining", FaultKind.STOP_EDGE),
    ],
)
def test_a_failure_is_excused_by_its_own_fault_at_its_own_time_only(end: End, code: str, kind: FaultKind):
    """Without a fault, with another fault, or long after it, the same failure is kvloom's."""
    assert excused(end, code, kind)
    assert not excused(end, code)
    assert not excused(end, code, FaultKind.KILL_REDIS)
    assert not excused(end, code, kind, began_at=100.0 - 2 - SETTLE_SECONDS)
    assert not excused(end, code, kind, began_at=106.0)


def test_the_death_of_one_shard_of_two_excuses_nothing():
    """That is what failover is for. Of both, it does."""
    assert not excused(End.ERROR, "shard_lost", FaultKind.KILL_SHARD)
    assert excused(End.ERROR, "shard_lost", FaultKind.KILL_SHARD, FaultKind.RESET_LINK)


def test_a_restart_excuses_the_loss_of_the_last_shard_only_with_a_fault():
    """A shard that is being restarted cannot take over what the death of all others leaves; by itself a planned restart
    must lose nothing."""
    assert excused(End.ERROR, "shard_lost", FaultKind.KILL_SHARD, FaultKind.RESTART_SHARD)
    assert not excused(End.ERROR, "shard_lost", FaultKind.RESTART_SHARD, FaultKind.RESTART_SHARD)


def test_one_router_of_two_excuses_nothing():
    """Answers go on at the other one, over HTTP and with the SDK. Of all routers, it does."""
    fleet = dataclasses.replace(FLEET, num_routers=2)
    for end, code, door in (
        (End.ERROR, "router_unavailable", Door.CHAT),
        (End.ERROR, "router_unavailable", Door.SDK_TEXT),
        (End.BROKEN, "", Door.SDK_TOKENS),
    ):
        assert not excused(end, code, FaultKind.KILL_ROUTER, door=door, fleet=fleet)
        assert excused(end, code, FaultKind.KILL_ROUTER, FaultKind.HANG_ROUTER, door=door, fleet=fleet)
        assert excused(end, code, FaultKind.KILL_ROUTER, FaultKind.RESTART_ROUTER, door=door, fleet=fleet)
        assert not excused(end, code, FaultKind.RESTART_ROUTER, FaultKind.RESTART_ROUTER, door=door, fleet=fleet)


def test_the_death_of_an_edge_excuses_no_resumable_stream():
    """Another edge goes on with it, from what Redis has of it: only without Redis it may be lost."""
    for end, code in ((End.BROKEN, ""), (End.ERROR, "events_gone"), (End.ERROR, "not_found")):
        assert not excused(end, code, FaultKind.KILL_EDGE, manner=Manner.RESUMABLE)
        assert not excused(end, code, FaultKind.RESET_CLIENTS, manner=Manner.FLAKY)
    assert excused(End.ERROR, "events_gone", FaultKind.KILL_EDGE, FaultKind.HANG_REDIS, manner=Manner.RESUMABLE)
    assert excused(End.BROKEN, "", FaultKind.KILL_EDGE, manner=Manner.PLAIN)


def test_only_an_edge_that_hung_takes_a_client_for_another():
    """It wakes up, finds that another edge has the stream, and tells whoever reads it: even the one client there is,
    which has come back from there. At any other time that is a fault, however well the answer ends."""
    seen = Transcript(choices=[], sent_at=100.0, ended_at=105.0, end=End.COMPLETE, num_takeovers=1)
    errand = Errand(QUESTION, Door.CHAT, Manner.FLAKY)
    for kind, is_right in ((FaultKind.HANG_EDGE, True), (FaultKind.KILL_EDGE, False)):
        struck = [Disturbance(kind, "edge-0", 102.0, 103.0)]
        assert is_excused(errand, seen, Finding(Verdict.OK), struck, FLEET) == is_right


@pytest.mark.parametrize("verdict", [Verdict.WRONG, Verdict.LOST, Verdict.DOUBLED, Verdict.MISCOUNTED])
def test_nothing_excuses_a_wrong_answer(verdict: Verdict):
    """Whatever happens."""
    disturbances = [Disturbance(kind, "x", 100.0) for kind in FaultKind]
    errand = Errand(QUESTION, Door.CHAT, Manner.PLAIN)
    assert not is_excused(errand, ended(End.COMPLETE), Finding(verdict), disturbances, FLEET)
