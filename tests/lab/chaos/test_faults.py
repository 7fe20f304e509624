"""The fault schedule of `kvloom-lab chaos` depends only on the seed, and faults explain only their own failures."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from lab.chaos.checking.explanations import FleetSize, is_explained
from lab.chaos.checking.verdicts import AnswerVerdict, Finding
from lab.chaos.clients.questions import Behaviour, Endpoint, Question, UserCall, draw_call, draw_question
from lab.chaos.clients.transcript import AnswerEnd, Transcript
from lab.chaos.fabric.faults import (
    COOL_DOWN_SECONDS,
    SETTLE_SECONDS,
    WARM_UP_SECONDS,
    Disturbance,
    FaultKind,
    plan_faults,
)

FLEET = FleetSize(num_edges=2, num_routers=1, num_shards=2, max_attempts=3)
QUESTION = Question("Tell me about tea.", True, 10, 1.0, seed=1)


def test_a_seed_gives_the_same_faults_every_time():
    """Otherwise a failed run could not be repeated."""
    assert plan_faults(7, 600.0, list(FaultKind)) == plan_faults(7, 600.0, list(FaultKind))
    assert plan_faults(7, 600.0, list(FaultKind)) != plan_faults(8, 600.0, list(FaultKind))
    assert plan_faults(7, 600.0, list(reversed(FaultKind))) == plan_faults(7, 600.0, list(FaultKind))


def test_every_kind_strikes_and_the_run_begins_and_ends_without_faults():
    """A kind that never strikes proves nothing, and open answers need time to end."""
    faults = plan_faults(3, 600.0, list(FaultKind))
    assert {fault.kind for fault in faults} == set(FaultKind)
    assert faults[0].at_seconds >= WARM_UP_SECONDS
    assert faults[-1].at_seconds < 600.0 - COOL_DOWN_SECONDS
    assert [fault.at_seconds for fault in faults] == sorted(fault.at_seconds for fault in faults)


def test_most_faults_leave_time_to_recover_and_some_do_not():
    """A run must show both a fabric that recovers and one that is struck again while it does."""
    faults = plan_faults(5, 3600.0, list(FaultKind))
    pauses = [
        later.at_seconds - fault.at_seconds - fault.duration_seconds for fault, later in itertools.pairwise(faults)
    ]
    overlapping = sum(pause < 1.0 for pause in pauses) / len(pauses)
    assert 0.03 < overlapping < 0.25


def test_no_kinds_no_faults():
    """A soak is a run without faults."""
    assert plan_faults(1, 600.0, []) == []


def test_users_call_every_endpoint_with_every_behaviour():
    """What is not called is not checked."""
    rng = random.Random(1)
    calls = [draw_call(rng, draw_question(rng, [" a", " b", " c", " d", " e"], (8, 90))) for _ in range(2000)]
    assert {call.behaviour for call in calls} == set(Behaviour)
    assert {call.endpoint for call in calls} == {*Endpoint} - {Endpoint.RESPONSE}  # which are asked for with --stored
    assert {call.question.n for call in calls} == {1, 2}
    assert any(call.question.stop for call in calls)
    assert any(call.question.temperature == 0.0 for call in calls)


def ended(end: AnswerEnd, code: str = "") -> Transcript:
    transcript = Transcript.begin(1, now=100.0)
    transcript.end, transcript.code, transcript.ended_at = end, code, 105.0
    return transcript


def explained(
    end: AnswerEnd,
    code: str,
    *kinds: FaultKind,
    behaviour: Behaviour = Behaviour.PLAIN,
    began_at: float = 101.0,
    endpoint: Endpoint = Endpoint.CHAT,
    fleet: FleetSize = FLEET,
) -> bool:
    verdict = {AnswerEnd.BROKEN: AnswerVerdict.BROKEN, AnswerEnd.REFUSED: AnswerVerdict.REFUSED}.get(
        end, AnswerVerdict.FAILED
    )
    disturbances = [Disturbance(kind, f"{kind}-{i}", began_at, began_at + 1) for i, kind in enumerate(kinds)]
    return is_explained(
        UserCall(QUESTION, endpoint, behaviour), ended(end, code), Finding(verdict), disturbances, fleet
    )


@pytest.mark.parametrize(
    ("end", "code", "kind"),
    [
        (AnswerEnd.BROKEN, "", FaultKind.KILL_EDGE),
        (AnswerEnd.BROKEN, "", FaultKind.RESET_CLIENTS),
        (AnswerEnd.ERROR, "router_unavailable", FaultKind.KILL_ROUTER),
        (AnswerEnd.REFUSED, "safety_unavailable", FaultKind.KILL_SAFETY),
        (AnswerEnd.REFUSED, "draining", FaultKind.STOP_EDGE),
    ],
)
def test_a_failure_is_explained_only_by_its_own_fault_at_its_own_time(end: AnswerEnd, code: str, kind: FaultKind):
    """Without a fault, with another fault, or long after it, the same failure is a bug of kvloom."""
    assert explained(end, code, kind)
    assert not explained(end, code)
    assert not explained(end, code, FaultKind.KILL_REDIS)
    assert not explained(end, code, kind, began_at=100.0 - 2 - SETTLE_SECONDS)
    assert not explained(end, code, kind, began_at=106.0)


def test_the_death_of_one_shard_of_two_explains_nothing():
    """Failover is made for that. The death of both shards does explain a failure."""
    assert not explained(AnswerEnd.ERROR, "shard_lost", FaultKind.KILL_SHARD)
    assert explained(AnswerEnd.ERROR, "shard_lost", FaultKind.KILL_SHARD, FaultKind.RESET_LINK)


def test_a_restart_explains_the_loss_of_the_last_shard_only_with_a_fault():
    """A shard that is being restarted cannot take over the work of all others when they die. A planned restart by
    itself must lose nothing."""
    assert explained(AnswerEnd.ERROR, "shard_lost", FaultKind.KILL_SHARD, FaultKind.RESTART_SHARD)
    assert not explained(AnswerEnd.ERROR, "shard_lost", FaultKind.RESTART_SHARD, FaultKind.RESTART_SHARD)


def test_one_router_of_two_explains_nothing():
    """Answers continue at the other one, over HTTP and with the SDK. The loss of all routers does explain a failure."""
    fleet = dataclasses.replace(FLEET, num_routers=2)
    for end, code, endpoint in (
        (AnswerEnd.ERROR, "router_unavailable", Endpoint.CHAT),
        (AnswerEnd.ERROR, "router_unavailable", Endpoint.SDK_TEXT),
        (AnswerEnd.BROKEN, "", Endpoint.SDK_TOKENS),
    ):
        assert not explained(end, code, FaultKind.KILL_ROUTER, endpoint=endpoint, fleet=fleet)
        assert explained(end, code, FaultKind.KILL_ROUTER, FaultKind.HANG_ROUTER, endpoint=endpoint, fleet=fleet)
        assert explained(end, code, FaultKind.KILL_ROUTER, FaultKind.RESTART_ROUTER, endpoint=endpoint, fleet=fleet)
        assert not explained(
            end, code, FaultKind.RESTART_ROUTER, FaultKind.RESTART_ROUTER, endpoint=endpoint, fleet=fleet
        )


def test_the_death_of_an_edge_explains_no_lost_resumable_stream():
    """Another edge continues the stream from Redis. It may be lost only if Redis is down too."""
    for end, code in ((AnswerEnd.BROKEN, ""), (AnswerEnd.ERROR, "events_gone"), (AnswerEnd.ERROR, "not_found")):
        assert not explained(end, code, FaultKind.KILL_EDGE, behaviour=Behaviour.RESUMABLE)
        assert not explained(end, code, FaultKind.RESET_CLIENTS, behaviour=Behaviour.FLAKY)
    assert explained(
        AnswerEnd.ERROR, "events_gone", FaultKind.KILL_EDGE, FaultKind.HANG_REDIS, behaviour=Behaviour.RESUMABLE
    )
    assert explained(AnswerEnd.BROKEN, "", FaultKind.KILL_EDGE, behaviour=Behaviour.PLAIN)


def test_only_an_edge_that_hung_mistakes_a_client_for_another():
    """It wakes up, finds that another edge has the stream, and notifies the reader, which may be the very client that
    has come back from the other edge. Without a hang this is a bug, even if the answer ends well."""
    transcript = Transcript(choices=[], sent_at=100.0, ended_at=105.0, end=AnswerEnd.COMPLETE, num_takeovers=1)
    call = UserCall(QUESTION, Endpoint.CHAT, Behaviour.FLAKY)
    for kind, is_right in ((FaultKind.HANG_EDGE, True), (FaultKind.KILL_EDGE, False)):
        struck = [Disturbance(kind, "edge-0", 102.0, 103.0)]
        assert is_explained(call, transcript, Finding(AnswerVerdict.OK), struck, FLEET) == is_right


@pytest.mark.parametrize(
    "verdict", [AnswerVerdict.WRONG, AnswerVerdict.LOST, AnswerVerdict.DOUBLED, AnswerVerdict.MISCOUNTED]
)
def test_nothing_explains_a_wrong_answer(verdict: AnswerVerdict):
    """No fault does."""
    disturbances = [Disturbance(kind, "x", 100.0) for kind in FaultKind]
    call = UserCall(QUESTION, Endpoint.CHAT, Behaviour.PLAIN)
    assert not is_explained(call, ended(AnswerEnd.COMPLETE), Finding(verdict), disturbances, FLEET)
