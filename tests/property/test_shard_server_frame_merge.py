"""Merged frames say what the single ones said, whatever was merged."""

from __future__ import annotations

from collections import defaultdict, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart, StepFrame, TokenLogprobs
from kvloom.v1.kv_event_pb2 import KvEventBatch, KvSnapshot
from kvloom.v1.shard_service_pb2 import LoadReport, ShardServiceConnectResponse
from shard_server.step_frames import MAX_MERGED_TOKENS, take_merged
from tests.examples import num_examples


@st.composite
def frames(draw: st.DrawFn) -> ShardServiceConnectResponse:
    frame = ShardServiceConnectResponse()
    if draw(st.booleans()):
        slots = draw(st.lists(st.integers(1, 4), unique=True, max_size=4))
        counts = [draw(st.integers(0, 3)) if draw(st.booleans()) else 1 for _ in slots]
        step = StepFrame(slots=slots, num_tokens=counts if any(count != 1 for count in counts) else ())
        for slot, count in zip(slots, counts, strict=True):
            step.token_ids.extend(draw(st.integers(0, 99)) for _ in range(count))
            step.deltas.append(draw(st.text("ab", max_size=2)))
            if slot == 1:
                step.logprobs.extend(TokenLogprobs(slot=slot, logprob=draw(st.integers(-9, 0))) for _ in range(count))
        if draw(st.booleans()):
            step.starts.append(SequenceStart(slot=draw(st.integers(1, 4))))
            step.finishes.append(SequenceFinish(slot=draw(st.integers(1, 4))))
        frame.step.CopyFrom(step)
    if draw(st.booleans()):
        frame.kv_events.CopyFrom(KvEventBatch(number=draw(st.integers(1, 99))))
    if draw(st.booleans()):
        frame.load.CopyFrom(LoadReport(num_running=draw(st.integers(0, 2))))
    if draw(st.integers(0, 9)) == 0:
        frame.kv_snapshot.CopyFrom(KvSnapshot(number=draw(st.integers(1, 99))))
    return frame


def told(sent: list[ShardServiceConnectResponse]) -> tuple[object, ...]:
    """What a router makes of frames, in order where there is one."""
    tokens, texts, logprobs = defaultdict(list), defaultdict(str), defaultdict(list)
    starts, finishes, cache, load = [], [], [], None
    for frame in sent:
        if frame.HasField("kv_snapshot"):
            cache.append(("snapshot", frame.kv_snapshot.number))
        cache += [("batch", frame.kv_events.number)] if frame.HasField("kv_events") else []
        cache += [("batch", batch.number) for batch in frame.more_kv_events]
        load = frame.load.num_running if frame.HasField("load") else load
        step, position = frame.step, 0
        counts = list(step.num_tokens) or [1] * len(step.slots)
        for slot, count, delta in zip(step.slots, counts, step.deltas, strict=True):
            tokens[slot] += step.token_ids[position : position + count]
            texts[slot] += delta
            position += count
        assert position == len(step.token_ids)
        for entry in step.logprobs:
            logprobs[entry.slot].append(entry.logprob)
        starts += [start.slot for start in step.starts]
        finishes += [finish.slot for finish in step.finishes]
    return dict(tokens), dict(texts), dict(logprobs), starts, finishes, cache, load


@settings(max_examples=num_examples(200), deadline=None)
@given(st.lists(frames(), min_size=1, max_size=8))
def test_merging_loses_and_reorders_nothing(waiting: list[ShardServiceConnectResponse]):
    """Tokens, text and logprobs of each slot, starts, ends, cache events and the last load; one entry a slot."""
    expected = told(waiting)
    pending = deque(waiting)
    sent: list[ShardServiceConnectResponse] = []
    while pending:
        sent.append(take_merged(pending))
        assert len(set(sent[-1].step.slots)) == len(sent[-1].step.slots)
    assert told(sent) == expected


def test_a_merged_frame_is_bounded():
    """A router that was away for long gets no frame that is larger than a message may be."""
    step = StepFrame(slots=range(1, 1001), token_ids=range(1000), deltas=["x"] * 1000)
    pending = deque(ShardServiceConnectResponse(step=step) for _ in range(20))
    assert len(take_merged(pending).step.token_ids) < MAX_MERGED_TOKENS + 1000
    assert pending
