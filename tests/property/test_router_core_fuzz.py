"""Whatever frames its peers send, the router core accepts them or answers PROTOCOL_VIOLATION, and its invariants hold.

Frames are protobuf messages with any value that the wire can carry, and they pass through the router's own conversion.
KVLOOM_FUZZ_EXAMPLES sets how many examples each test runs."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom.errors import KvloomError
from kvloom.v1 import generation_pb2, kv_event_pb2, safety_service_pb2, shard_service_pb2
from kvloom.v1.error_reason_pb2 import Error, ErrorReason
from router import convert
from router.core import events as ev
from router.core.actions import FleetChanged, RequestEnded, SendStep
from router.core.core import CoreConfig, RouterCore
from router.core.rule_settings import NO_RAMP, OverloadSettings
from tests.examples import num_examples

NUM_EXAMPLES = int(os.environ.get("KVLOOM_FUZZ_EXAMPLES", num_examples(60)))
FUZZ = settings(
    max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
SHARDS = ("s0", "s1", "s2")
CLIENTS = ("c0", "c1")
UINT32 = st.integers(0, 6) | st.sampled_from([0, 1, 2, 63, 64, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
UINT64 = st.integers(0, 4) | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1])
DOUBLE = st.sampled_from([0.0, 5e-324, 1e-9, 0.5, 30.0, 1e300, -1.0, float("inf"), float("-inf"), float("nan")])
SLOT = st.integers(0, 5) | st.sampled_from([2**31, 2**32 - 1])
TEXT = st.text(max_size=3)
REASON = st.integers(0, 6) | st.just(2**31 - 1)


def messages(kind: type, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Messages of a protobuf type, with each field present or absent."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: kind(**values))


def lists(of: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(of, max_size=4)


ERRORS = messages(Error, reason=st.integers(0, 60), message=TEXT, field=TEXT, retry_after_seconds=DOUBLE)
STARTS = messages(
    generation_pb2.SequenceStart, slot=SLOT, num_cached_tokens=UINT32, shard_id=TEXT, queue_time_seconds=DOUBLE
)
FINISHES = messages(
    generation_pb2.SequenceFinish,
    slot=SLOT,
    reason=REASON,
    num_prompt_tokens=UINT32,
    num_cached_tokens=UINT32,
    num_output_tokens=UINT32,
    stop_string=TEXT,
    error=ERRORS,
)
LOGPROBS = messages(generation_pb2.TokenLogprobs, slot=SLOT)
WILD_STEPS = messages(
    generation_pb2.StepFrame,
    slots=lists(SLOT),
    num_tokens=lists(UINT32),
    token_ids=lists(UINT32),
    deltas=lists(TEXT),
    logprobs=lists(LOGPROBS),
    starts=lists(STARTS),
    finishes=lists(FINISHES),
)


@st.composite
def fitting_steps(draw: st.DrawFn) -> generation_pb2.StepFrame:
    """Steps whose arrays fit together, so that the code after that check is reached."""
    slots = draw(lists(SLOT))
    counts = draw(st.lists(st.integers(0, 3), min_size=len(slots), max_size=len(slots)))
    return generation_pb2.StepFrame(
        slots=slots,
        num_tokens=counts,
        token_ids=[7] * sum(counts),
        deltas=[draw(TEXT) for _ in slots],
        logprobs=draw(lists(LOGPROBS)),
        starts=draw(lists(STARTS)),
        finishes=draw(lists(FINISHES)),
    )


LOADS = messages(
    shard_service_pb2.LoadReport,
    num_running=UINT32,
    num_waiting=UINT32,
    num_queued_prefill_tokens=UINT32,
    num_decode_context_tokens=UINT32,
    num_available_blocks=UINT32,
    prefill_tokens_per_second=DOUBLE,
    decode_step_seconds=DOUBLE,
    draining=st.booleans(),
    num_own_running=UINT32,
    num_own_waiting=UINT32,
    num_own_queued_prefill_tokens=UINT32,
    num_own_decode_context_tokens=UINT32,
)
INFOS = messages(
    shard_service_pb2.ShardInfo,
    incarnation_id=TEXT,
    model=st.sampled_from(["m", "m", "n", ""]),
    block_size=UINT32,
    num_blocks=UINT32,
    max_batch=UINT32,
    max_model_len=UINT32,
    capabilities=lists(TEXT),
)
GOOD_INFO = shard_service_pb2.ShardInfo(model="m", block_size=4, num_blocks=50, max_batch=2, max_model_len=60)
HASHES = lists(UINT64)
KV_EVENTS = st.one_of(
    HASHES.map(lambda h: kv_event_pb2.KvEvent(block_stored=kv_event_pb2.BlockStored(block_hashes=h))),
    HASHES.map(lambda h: kv_event_pb2.KvEvent(block_removed=kv_event_pb2.BlockRemoved(block_hashes=h))),
    st.just(kv_event_pb2.KvEvent(all_blocks_cleared=kv_event_pb2.AllBlocksCleared())),
    st.just(kv_event_pb2.KvEvent()),
)
BATCHES = messages(kv_event_pb2.KvEventBatch, number=UINT64, events=lists(KV_EVENTS))
VERDICTS = messages(safety_service_pb2.PromptVerdict, check_id=UINT32, decision=st.integers(0, 4))
SCREENED = messages(
    safety_service_pb2.ScreenResponse,
    slots=lists(SLOT),
    num_clear_chars=lists(UINT32),
    halts=lists(messages(safety_service_pb2.Halt, slot=SLOT, num_clear_chars=UINT32)),
    closed_slots=lists(SLOT),
)
REQUESTS = st.builds(
    ev.Request,
    request_id=st.sampled_from(["a", "b", "c", "d", ""]),
    client_id=st.sampled_from(CLIENTS),
    model=st.sampled_from(["m", "m", "m", "n"]),
    prompt_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=12),
    prompt_text=TEXT,
    choices=st.lists(
        st.builds(
            ev.ChoiceSpec,
            slot=SLOT,
            index=st.integers(0, 3),
            output_token_ids=lists(UINT32),
            num_delivered_chars=UINT32,
        ),
        max_size=3,
    ),
    max_tokens=st.none() | UINT32,
    timeout_seconds=st.sampled_from([0.0, 1e-9, 0.5, 1e300]),
    tenant=st.sampled_from(["", "t"]),
    tier=st.sampled_from(ev.TierRank),
)


def of_shard(frames: st.SearchStrategy[Any], make: Any) -> st.SearchStrategy[ev.Event]:
    return st.builds(make, st.sampled_from(SHARDS), frames)


def shard_up(shard_id: str, info: shard_service_pb2.ShardInfo) -> ev.Event:
    named = shard_service_pb2.ShardInfo()
    named.CopyFrom(info)
    named.shard_id = shard_id
    return ev.ShardUp(convert.shard_from_proto(named))


FRAME_PARTS: st.SearchStrategy[Any] = st.one_of(
    of_shard(fitting_steps(), lambda s, f: ev.StepArrived(s, convert.step_from_frame(f))),
    of_shard(LOADS, lambda s, f: ev.LoadReported(s, convert.load_from_proto(f))),
    of_shard(BATCHES, convert.kv_events_from_proto),
    st.builds(ev.KvSnapshotArrived, st.sampled_from(SHARDS), UINT64, HASHES),
)
FRAMES = st.builds(ev.FrameArrived, st.sampled_from(SHARDS), st.lists(FRAME_PARTS, max_size=4))
EVENTS: st.SearchStrategy[ev.Event] = st.one_of(
    REQUESTS.map(ev.RequestArrived),
    REQUESTS.map(ev.RequestArrived),
    of_shard(fitting_steps(), lambda s, f: ev.StepArrived(s, convert.step_from_frame(f))),
    of_shard(fitting_steps(), lambda s, f: ev.StepArrived(s, convert.step_from_frame(f))),
    of_shard(WILD_STEPS, lambda s, f: ev.StepArrived(s, convert.step_from_frame(f))),
    of_shard(INFOS | st.just(GOOD_INFO), shard_up),
    st.sampled_from(SHARDS).map(ev.ShardDown),
    of_shard(LOADS, lambda s, f: ev.LoadReported(s, convert.load_from_proto(f))),
    of_shard(BATCHES, convert.kv_events_from_proto),
    st.builds(ev.KvSnapshotArrived, st.sampled_from(SHARDS), UINT64, HASHES),
    FRAMES,
    st.builds(ev.SlotsCancelled, st.sampled_from(CLIENTS), lists(SLOT)),
    st.sampled_from("abcd").map(ev.RequestCancelled),
    st.sampled_from(CLIENTS).map(ev.ClientGone),
    VERDICTS.map(convert.verdict_from_proto),
    SCREENED.map(convert.screened_from_proto),
    st.builds(ev.SafetyUp, st.booleans(), st.booleans()),
    st.just(ev.SafetyDown()),
    st.just(ev.Tick()),
)
CONFIGS = st.builds(
    CoreConfig,
    max_queued_requests=st.integers(1, 3),
    max_queue_seconds=st.sampled_from([0.1, 5.0]),
    request_timeout_seconds=st.sampled_from([0.5, 600.0]),
    policy=st.sampled_from(["ect", "least_requests"]),
    answer_mode=st.sampled_from(["gate", "async", "off"]),
    safety_required=st.booleans(),
    max_uncleared_tokens=st.integers(1, 4),
    decision_sample_share=st.just(1.0),
    overload=st.builds(
        OverloadSettings,
        sheds_load_early=st.booleans(),
        outage_patience_seconds=st.sampled_from([0.0, 0.5]),
        ramp_start_requests=st.sampled_from([NO_RAMP, 1, 4]),
    ),
)


@FUZZ
@given(config=CONFIGS, history=st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.001, 0.3])), max_size=40))
def test_any_history_of_frames(config: CoreConfig, history: list[tuple[ev.Event, float]]) -> None:
    """A peer that is broken, outdated or hostile loses its own stream, and nothing else happens."""
    core = RouterCore(config, seed=1)
    now = 1.0
    core.handle(ev.SafetyUp(screens_prompts=False, screens_answers=False), now)
    for shard_id in SHARDS[:2]:
        core.handle(shard_up(shard_id, GOOD_INFO), now)
        core.handle(ev.KvSnapshotArrived(shard_id, 0, ()), now)
    ended: list[str] = []
    for event, seconds in history:
        now += seconds
        try:
            for action in core.handle(event, now):
                if isinstance(action, RequestEnded):
                    ended.append(action.request_id)
                    assert action.num_output_tokens >= 0
        except KvloomError as error:
            if error.reason != ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION:
                raise
        core.check_integrity()
        deadline = core.next_deadline()
        assert deadline is None or deadline == deadline, "not a number"
    for client_id in CLIENTS:
        core.handle(ev.ClientGone(client_id), now)
    for shard_id in SHARDS:
        core.handle(ev.ShardDown(shard_id), now)
    core.handle(ev.SafetyDown(), now)
    core.check_integrity()
    assert core.is_idle


def outcome(core: RouterCore, actions: list[Any]) -> tuple[Any, ...]:
    """The result of events, however many there were: steps for a client are joined, other actions keep their order."""
    sent: dict[str, list[tuple[Any, ...]]] = {}
    for action in actions:
        if isinstance(action, SendStep):
            step = action.step
            counts = step.num_tokens or [1] * len(step.slots)
            entries = [("tokens", *entry) for entry in zip(step.slots, counts, step.deltas, strict=True)]
            starts = [("start", start) for start in step.starts]
            sent.setdefault(action.client_id, []).extend([*starts, *entries, *(("end", end) for end in step.finishes)])
    others = [action for action in actions if not isinstance(action, SendStep | FleetChanged)]
    state = (core.fleet, core.num_queued_requests, core.is_idle, core.next_deadline())
    return {client: sorted(map(repr, entries)) for client, entries in sent.items()}, others, state


@FUZZ
@given(
    config=CONFIGS,
    history=st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.001, 0.3])), max_size=20),
    frame=FRAMES,
)
def test_a_frame_in_one_pass_is_its_parts_one_by_one(
    config: CoreConfig, history: list[tuple[ev.Event, float]], frame: ev.FrameArrived
) -> None:
    """The simulation tests hand the core a frame's parts one by one: what they prove must hold for whole frames."""
    ends: list[tuple[Any, ...]] = []
    for is_whole in (True, False):
        core = RouterCore(config, seed=1)
        now = 1.0
        core.handle(ev.SafetyUp(screens_prompts=False, screens_answers=False), now)
        for shard_id in SHARDS[:2]:
            core.handle(shard_up(shard_id, GOOD_INFO), now)
        for event, seconds in history:
            now += seconds
            with contextlib.suppress(KvloomError):
                core.handle(event, now)
        actions: list[Any] = []
        try:
            for event in [frame] if is_whole else frame.parts:
                actions += core.handle(event, now)
        except KvloomError:
            return  # the stream that brought it will be broken
        core.check_integrity()
        ends.append(outcome(core, actions))
    assert ends[0] == ends[1]
