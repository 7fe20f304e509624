"""The decision log joins placements and ends, forgets old requests, and writes no secrets."""

from __future__ import annotations

import dataclasses
import io

import msgspec
import pytest
from rich.console import Console

from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP
from router.core.actions import PlacementDecided, RequestEnded
from router.core.events import ChoiceSpec, Request, ShardDescription, TierRank
from router.core.fleet.fleet import ShardState
from router.core.fleet.shard_health import HealthState
from router.core.load.prediction import PlacementPrediction
from router.core.objectives import Cause, Objectives, ObjectivesOutcome
from router.core.placement.plan import Pick, PlacementPlan, ShardPlan
from router.core.placement.policy import Candidate
from router.core.priority_classes import PriorityClass
from router.core.request_usage import RequestUsage
from router.decisions.journal import FLEET_CHECK_SECONDS, DecisionJournal
from router.decisions.log import DecisionLog
from router.decisions.records import FleetLine, RequestLine, read_decisions
from router.decisions.responses import explanation_to_proto
from tools.cli.explain import print_explanation

HASHES = [2**64 - 1, 0, 17]
SHARDS = (
    ShardPlan("s1", 32, 2, 1, 640, 0.25, 1.5, {"queue": 1.0, "own": 0.5}),
    ShardPlan("s0", 0, 0, 0, 0, 0.125, 1.25, {"queue": 0.0, "own": 1.25}),
    ShardPlan("s2", filtered_reason="draining"),
)


def candidate(plan: ShardPlan) -> Candidate:
    """Returns a candidate with this plan's values."""
    return Candidate(
        shard_id=plan.shard_id,
        turn=0,
        block_size=16,
        num_blocks=100,
        num_overlap_tokens=plan.num_overlap_tokens,
        num_prefill_tokens=50 - plan.num_overlap_tokens,
        num_queued_prefill_tokens=plan.num_queued_prefill_tokens,
        num_running=plan.num_running,
        num_waiting=plan.num_waiting,
        num_context_tokens=0,
        num_used_blocks=0.0,
        num_evicted_blocks=0,
        reuse_probability=0.0,
        queue_seconds=plan.predicted_ttft_seconds,
        memory_wait_seconds=0.0,
        own_seconds=0.0,
        bound_arrival_rate=0.0,
        utilisation=0.0,
        memory_pressure_seconds=0.0,
        decode_delay_seconds=0.0,
        num_needed_blocks=0,
        num_expected_tokens=0,
    )


# Here the shards have the core's order instead of the order of an explanation.
PICK = Pick(
    50,
    picked_shard_id="s1",
    best_shard_id="s0",
    term_names=("queue", "own"),
    candidates=[candidate(SHARDS[1]), candidate(SHARDS[0])],
    terms=[tuple(SHARDS[1].cost_terms.values()), tuple(SHARDS[0].cost_terms.values())],
    filtered=[SHARDS[2]],
)


def decided(request_id: str, attempt_id: int = 1, **fields) -> PlacementDecided:
    defaults = {"model": "m", "prompt_token_ids": range(50), "prompt_text": "secret prompt"}
    request = Request(request_id, "client", choices=[ChoiceSpec(1, 0)], **{**defaults, **fields})
    return PlacementDecided(request, attempt_id, PICK, 16, HASHES, decided_at=1.0)


def ended(request_id: str, **fields) -> RequestEnded:
    record = RequestEnded(
        request_id=request_id,
        tenant="",
        model="m",
        shard_id="s1",
        num_attempts=1,
        reason=FINISH_REASON_STOP,
        error_reason=0,
        num_prompt_tokens=50,
        num_cached_tokens=32,
        num_output_tokens=7,
        queue_time_seconds=0.5,
        ttft_seconds=1.0,
        e2e_latency_seconds=2.0,
        prediction=PlacementPrediction(0.25, 0.25, 0.25, 7, 0.0, 0.0),
    )
    return msgspec.structs.replace(record, **fields)


def shard_state(shard_id: str, **fields) -> ShardState:
    description = ShardDescription(shard_id, "i1", "m", block_size=16, num_blocks=100, max_batch=8, max_model_len=4096)
    state = ShardState(description, False, HealthState.HEALTHY, 10_000.0, 0.02, {"token": 1e-4})
    return dataclasses.replace(state, **fields)


class World:
    """A log with a journal whose lines it keeps."""

    def __init__(self, max_remembered: int = 10, *, names_tenants: bool = False, **settings) -> None:
        self.now = 1000.0
        self.takes_lines = True
        self.num_dropped = 0
        self.shards = [shard_state("s1"), shard_state("s0")]
        self.raw: list[bytes] = []
        journal = DecisionJournal(
            self,
            self._on_dropped,
            lambda: self.shards,
            policy="ect",
            router_id="r",
            names_tenants=names_tenants,
            clock=lambda: self.now,
        )
        self.log = DecisionLog(max_remembered, journal, clock=lambda: self.now, **settings)

    def put(self, header: bytes, line: bytes) -> bool:
        if self.takes_lines:
            self.raw += [header, line] if header else [line]
        return self.takes_lines

    def serve(self, request_id: str, **fields) -> None:
        self.log.placement_decided(decided(request_id, **fields))
        self.log.request_ended(ended(request_id))

    @property
    def lines(self) -> list[FleetLine | RequestLine]:
        return list(read_decisions(self.raw))

    def _on_dropped(self, count: int) -> None:
        self.num_dropped += count


def test_a_line_holds_all_that_a_replay_needs() -> None:
    """`kvloom simulate --decisions` needs the arrival, size, hashes, session, fleet and outcome."""
    world = World()
    world.log.placement_decided(decided("r1", session_key="chat", tenant="acme", max_tokens=9))
    world.now = 1002.0
    world.log.request_ended(ended("r1"))
    fleet, line = world.lines
    assert isinstance(fleet, FleetLine)
    assert isinstance(line, RequestLine)
    assert (fleet.version, fleet.at, fleet.router_id, fleet.policy) == (2, 1002.0, "r", "ect")
    assert [shard.shard_id for shard in fleet.shards] == ["s0", "s1"]
    assert (fleet.shards[0].block_size, fleet.shards[0].num_blocks, fleet.shards[0].max_batch) == (16, 100, 8)
    assert (fleet.shards[0].decode_step_seconds, fleet.shards[0].prefill_seconds) == (0.02, {"token": 1e-4})
    assert (line.arrived_at, line.num_prompt_tokens, line.num_choices, line.max_tokens) == (999.5, 50, 1, 9)
    assert (line.block_size, list(line.hashes())) == (16, HASHES)
    attempt = line.attempts[0]
    assert (attempt.attempt_id, attempt.decided_at, attempt.picked_shard_id) == (1, 1000.0, "s1")
    assert tuple(score.to_plan() for score in attempt.shards) == SHARDS
    assert (line.outcome.reason, line.outcome.error, line.outcome.ttft_seconds) == ("stop", "", 1.0)
    assert (line.outcome.num_cached_tokens, line.outcome.num_output_tokens) == (32, 7)


def test_no_prompt_and_no_name_gets_into_the_file() -> None:
    """The file may be given to people who tune routing, so it must not contain what users wrote or who they are."""
    worlds = [World(), World()]
    for world in worlds:
        world.serve("r1", session_key="chat", tenant="acme")
        world.serve("r2", session_key="chat", tenant="other")
        assert not any(word in b"".join(world.raw) for word in (b"secret", b"acme", b"chat"))
    first, second = (line for line in worlds[0].lines if isinstance(line, RequestLine))
    assert first.session == second.session, "requests of one session can still be joined"
    assert len({first.tenant, second.tenant, first.session}) == 3
    assert first.session != worlds[1].lines[1].session, "names cannot be guessed: each process has its salt"


def test_only_the_latest_are_remembered() -> None:
    """The memory of a router that runs for months must not grow."""
    world = World(max_remembered=3)
    for number in range(10):
        world.serve(f"r{number}")
    assert world.log.num_remembered == 3
    assert world.log.find("r6") is None
    assert world.log.find("r7") is not None
    assert len(world.lines) == 1 + 10
    assert not world.num_dropped


def test_memory_is_bounded_in_bytes_too() -> None:
    """With hundreds of shards a limit on the number of requests alone would not bound the memory."""
    world = World(max_remembered=1000, max_remembered_bytes=5000)
    for number in range(100):
        world.log.placement_decided(decided(f"r{number}"))
    remembered = [found for number in range(100) if (found := world.log.find(f"r{number}"))]
    assert len(remembered) == world.log.num_remembered
    assert 1 < sum(entry.num_bytes for entry in remembered) <= 5000
    assert world.log.find("r99") is not None
    assert world.num_dropped == 100 - len(remembered)


def test_what_is_forgotten_before_its_end_counts_as_dropped() -> None:
    """Missing lines in the file must be counted."""
    world = World(max_remembered=2)
    for request_id in ("r1", "r2", "r3"):
        world.log.placement_decided(decided(request_id))
    world.log.placement_decided(decided("r1", attempt_id=2))
    for request_id in ("r1", "r2", "r3"):
        world.log.request_ended(ended(request_id))
    assert [line.request_id for line in world.lines if isinstance(line, RequestLine)] == ["r3"]
    assert world.num_dropped == 2
    found = world.log.find("r1")
    assert found is not None, "its second placement can still be explained"
    assert [attempt.attempt_id for attempt in found.attempts] == [2]
    assert explanation_to_proto(found).outcome.predicted_ttft_seconds == 0.75, "it is kept with the request"


def test_a_rejected_duplicate_does_not_end_the_running_request() -> None:
    """The rejection of a duplicate id ends a request of that id, but not the one that runs."""
    world = World()
    world.log.placement_decided(decided("r1"))
    refusal = {"num_attempts": 0, "reason": FINISH_REASON_ERROR, "ttft_seconds": None}
    world.log.request_ended(ended("r1", error_reason=ErrorReason.ERROR_REASON_DUPLICATE_REQUEST_ID, **refusal))
    assert not world.lines
    world.log.request_ended(ended("r1"))
    world.log.request_ended(ended("r1"))
    assert len(world.lines) == 2


def test_a_name_used_again_is_a_new_request() -> None:
    """Clients choose the ids, and ask about the latest request of an id."""
    world = World()
    world.serve("r1")
    world.log.placement_decided(decided("r1"))
    found = world.log.find("r1")
    assert found is not None
    assert found.ended is None
    assert len(found.attempts) == 1


def test_a_changed_fleet_is_written_again() -> None:
    """A replay needs the shards and speeds of the time; measurement noise is not a change."""
    world = World()
    world.serve("r1")
    world.shards[0] = shard_state("s1", decode_step_seconds=0.021)
    world.now += FLEET_CHECK_SECONDS
    world.serve("r2")
    world.shards[0] = shard_state("s1", decode_step_seconds=0.04)
    world.serve("r3")
    assert [type(line) for line in world.lines] == [FleetLine, *[RequestLine] * 3]
    world.now += FLEET_CHECK_SECONDS
    world.serve("r4")
    world.shards.pop()
    world.log.fleet_changed()
    world.serve("r5")
    assert [type(line) for line in world.lines[4:]] == [FleetLine, RequestLine] * 2


def test_a_dropped_fleet_line_is_written_again() -> None:
    """Header and line are dropped together when there is no room, so the next line must have a header."""
    world = World()
    world.takes_lines = False
    world.serve("r1")
    world.takes_lines = True
    world.serve("r2")
    assert [type(line) for line in world.lines] == [FleetLine, RequestLine]


def test_costs_that_are_not_finite_survive() -> None:
    """A policy may exclude a shard by an infinite cost, which JSON cannot represent."""
    infinite = float("inf")
    ruled_out = ShardPlan("s9", 0, 0, 0, 0, infinite, infinite, {"queue": infinite, "own": 0.0})
    pick = msgspec.structs.replace(
        PICK,
        best_shard_id="s1",
        candidates=[candidate(ruled_out), candidate(SHARDS[0])],
        terms=[(infinite, 0.0), (1.0, 0.5)],
        filtered=(),
    )
    assert pick.plan == PlacementPlan(50, [SHARDS[0], ruled_out], "s1")
    log = DecisionLog(10)
    log.placement_decided(msgspec.structs.replace(decided("r1"), pick=pick))
    found = log.find("r1")
    assert found is not None
    assert [score.to_plan() for score in found.attempts[0].shards] == pick.plan.shards
    assert explanation_to_proto(found).decisions[0].plan.regret.cost_seconds == 0


def test_an_explanation_has_regret_and_prediction_error() -> None:
    """The regret compares the shards that could have taken the request, and the error compares the prediction with what
    happened."""
    log = DecisionLog(10)
    log.placement_decided(decided("r1"))
    running = log.find("r1")
    assert running is not None
    assert not explanation_to_proto(running).HasField("outcome")
    log.request_ended(ended("r1"))
    explained = explanation_to_proto(running)
    plan = explained.decisions[0].plan
    assert plan.num_prompt_tokens == 50
    assert [shard.shard_id for shard in plan.shards] == ["s1", "s0", "s2"]
    assert dict(plan.shards[0].cost_terms) == {"queue": 1.0, "own": 0.5}
    assert (plan.regret.cost_seconds, plan.regret.ttft_seconds) == (0.25, 0.125)
    assert explained.outcome.predicted_ttft_seconds == 0.75
    assert explained.outcome.ttft_error_seconds == 0.25


def test_a_request_without_a_first_token_has_no_error_of_prediction() -> None:
    """Without a first token the prediction cannot be checked."""
    log = DecisionLog(10)
    log.placement_decided(decided("r1"))
    log.request_ended(ended("r1", ttft_seconds=None))
    found = log.find("r1")
    assert found is not None
    outcome = explanation_to_proto(found).outcome
    assert not outcome.HasField("ttft_seconds")
    assert not outcome.HasField("ttft_error_seconds")
    assert outcome.predicted_ttft_seconds == 0.75


def test_reading_skips_a_torn_line_and_names_a_strange_one() -> None:
    """A killed router leaves an incomplete line; a file of another kind must not be replayed as if it were empty."""
    world = World()
    world.serve("r1")
    torn = [world.raw[0], world.raw[1][:40] + b"\n", b"\n", world.raw[1]]
    assert [type(line) for line in read_decisions(torn)] == [FleetLine, RequestLine]
    newer = msgspec.json.encode({**msgspec.json.decode(world.raw[1]), "invented_later": 1})
    assert [type(line) for line in read_decisions([newer])] == [RequestLine]
    with pytest.raises(ValueError, match="line 2: "):
        list(read_decisions([world.raw[0], b'{"type":"trace"}\n']))


def test_the_ids_of_callers_are_forgotten_with_their_requests() -> None:
    """Callers choose any number of ids, so what is remembered of them is bounded like the requests."""
    log = DecisionLog(2)
    for number in range(5):
        log.placement_decided(decided(f"r{number}", client_request_id="shared" if number else "alone"))
    assert log.find_by_client_request_id("shared") == ["r4", "r3"]
    assert log.find_by_client_request_id("alone") == []
    log.placement_decided(decided("r4", client_request_id="other"))
    assert log.find_by_client_request_id("shared") == ["r3"]
    assert log.find_by_client_request_id("other") == ["r4"]


def test_an_explanation_says_the_class_what_it_has_gained_by_waiting_and_whose_share_it_took() -> None:
    """ "Why did this one wait, and that one not" is a question about classes as often as about shards."""
    log = DecisionLog(10)
    gold = PriorityClass("gold", 3, aging_seconds=0.25)
    log.placement_decided(decided("r1", tenant="acme/search", priority_class=gold, fairness_id="chat 7"))
    log.request_ended(ended("r1", priority_class=gold))
    found = log.find("r1")
    assert found is not None
    explained = explanation_to_proto(found)
    assert (explained.priority_class, explained.rank, explained.outcome.rank) == ("gold", 3, 1)
    output = io.StringIO()
    print_explanation(explained, Console(file=output, width=200))
    shown = output.getvalue()
    assert "class gold, rank 3, 1 after 0.5 s of waiting; in the share of acme/search, sub-flow chat 7" in shown


def test_an_evicted_request_is_explained() -> None:
    """It waited, and its caller asks why it waited in vain."""
    log = DecisionLog(10, remembers_unplaced=lambda _request_id: True)
    unserved = {"num_attempts": 0, "shard_id": "", "reason": FINISH_REASON_ERROR, "ttft_seconds": None}
    log.request_ended(ended("r1", **unserved))
    found = log.find("r1")
    assert found is not None
    explained = explanation_to_proto(found)
    assert (explained.outcome.end, explained.priority_class, len(explained.decisions)) == ("evicted", "interactive", 0)
    output = io.StringIO()
    print_explanation(explained, Console(file=output, width=200))
    assert "ended: evicted, error after 2.000 s" in output.getvalue()
    log = DecisionLog(10)
    log.request_ended(ended("r1", **unserved))
    assert log.find("r1") is None


def test_a_refused_request_is_remembered_within_a_bound() -> None:
    """Whoever asks why a request was refused gets an answer, and a flood of refusals leaves the placed ones known."""
    log = DecisionLog(8, remembers_unplaced=lambda _request_id: True)
    refusal = {"num_attempts": 0, "reason": FINISH_REASON_ERROR, "ttft_seconds": None, "is_admitted": False}
    outcome = ObjectivesOutcome(Objectives(ttft_seconds=0.25), "interactive", 0.5, Cause.LOAD)
    log.placement_decided(decided("placed"))
    for number in range(20):
        log.request_ended(ended(f"refused{number}", **refusal, objectives=outcome, client_request_id="mine"))
    assert log.num_remembered == 3
    assert log.find("placed") is not None
    assert log.find_by_client_request_id("mine") == ["refused19", "refused18"]
    found = log.find("refused19")
    assert found is not None
    explanation = explanation_to_proto(found)
    assert not explanation.decisions
    assert explanation.outcome.objectives.wanted.ttft_ms == 250
    assert (explanation.outcome.objectives.refused, explanation.outcome.end) == ("load", "rejected")
    log.placement_decided(decided("refused19"))
    assert log.find("refused19").attempts


def test_refused_requests_are_in_the_file() -> None:
    """`kvloom whatif` asks what other limits would have admitted. A request that was refused has no placement, so its
    line has no attempts and no hashes."""
    world = World(remembers_unplaced=lambda request_id: request_id != "not sampled")
    usage = RequestUsage(TierRank.BATCH, None, "key-1", "", 0, 0.0)
    for request_id in ("r1", "not sampled"):
        refusal = {"reason": FINISH_REASON_ERROR, "error_reason": ErrorReason.ERROR_REASON_RATE_LIMITED}
        world.log.request_ended(ended(request_id, **refusal, num_attempts=0, tenant="acme", usage=usage))
    _, line = world.lines
    assert isinstance(line, RequestLine)
    assert (line.request_id, line.outcome.error, line.outcome.num_attempts) == ("r1", "rate_limited", 0)
    assert (line.block_size, line.attempts, list(line.hashes()), line.is_batch) == (0, [], [], True)
    assert len({line.tenant, line.key, ""}) == 3, "they can be told apart"
    assert not any(name in b"".join(world.raw) for name in (b"acme", b"key-1"))


def test_names_are_in_the_file_if_they_are_wanted() -> None:
    """Limits are of accounts by name: `router.decision_log.named` says that the file may have them. Sessions stay
    hashed."""
    world = World(names_tenants=True)
    world.serve("r1", session_key="chat", tenant="acme", key_id="key-1")
    line = world.lines[1]
    assert isinstance(line, RequestLine)
    assert (line.tenant, line.key) == ("acme", "key-1")
    assert b"chat" not in b"".join(world.raw)
