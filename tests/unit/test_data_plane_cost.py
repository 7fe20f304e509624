"""What a token costs in the pure relay path may not grow unnoticed: calls and bytecodes are counted, never seconds.

`python -m tests.unit.test_data_plane_cost` prints the counts; put them into tests/baselines/data_plane_cost.json when a
change is meant to cost what it costs, and say in the commit what it buys.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast

import aiohttp
from aiohttp import web

from edge_http.shapes import ChatShape, Envelope
from edge_http.sse import EventStream
from edge_http.stream import StreamedAnswer
from kvloom.router_link import GrpcRouterLink, LinkRequest
from kvloom.v1.generation_pb2 import SamplingParams, SequenceStart, StepFrame, StopConditions
from router import convert
from router.core.actions import SendStep, SubmitAttempt
from router.core.events import SafetyUp, StepArrived
from router.prefilter import Prefilter
from router.step_outbox import StepOutbox
from tests.fakes.core_rig import CoreRig, only

BASELINE: Final = Path(__file__).parents[1] / "baselines" / "data_plane_cost.json"
TOLERANCE: Final = 1.05
NUM_STREAMS: Final = 32
NUM_STEPS: Final = 20


class CountingTransport:
    """Takes what is written."""

    def __init__(self) -> None:
        self.num_writes = 0

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.num_writes += bool(data)


class ConnectedRequest:
    """What an EventStream asks of a request."""

    version = aiohttp.HttpVersion11
    keep_alive = True

    def __init__(self, transport: CountingTransport) -> None:
        self.transport = transport


def router_half() -> Callable[[], None]:
    """A shard's step with a token for each of 32 gated answers, to the frame for their client."""
    rig = CoreRig(safety=None, max_queued_requests=1000)
    rig.handle(SafetyUp(False, True, Prefilter(["forbidden"], ["not this"])))
    rig.add_shard(max_batch=NUM_STREAMS, max_model_len=1000, num_blocks=10_000)
    slots: list[int] = []
    for number in range(NUM_STREAMS):
        actions = rig.submit(f"r{number}", slots=[number], max_tokens=500)
        slots += [choice.slot for choice in only(actions, SubmitAttempt).choices]
    for slot in slots:
        rig.start("s0", slot)
    frame = StepFrame(slots=slots, token_ids=[7] * NUM_STREAMS, deltas=[" word"] * NUM_STREAMS)
    outbox, core, now = StepOutbox(), rig.core, rig.now

    def relay() -> None:
        for action in core.handle(StepArrived("s0", convert.step_from_frame(frame)), now):
            assert isinstance(action, SendStep)
            outbox.add(action.step)
        step = outbox.take()
        assert step is not None
        assert len(step.slots) == NUM_STREAMS
        convert.fill_frame(StepFrame(), step)

    return relay


def edge_half() -> Callable[[], None]:
    """A router's step with a token for each of 32 streams, to their sockets."""
    link = GrpcRouterLink("127.0.0.1:1", "edge")
    link._connected = True
    transport = CountingTransport()
    envelope = Envelope(id="chatcmpl-1", model="m", system_fingerprint="fp", num_choices=1, include_usage=False)
    for number in range(NUM_STREAMS):
        events = EventStream(cast(web.BaseRequest, ConnectedRequest(transport)), 1 << 20)
        shape = ChatShape(envelope, cast(Any, None))
        answer = StreamedAnswer(
            [5], 1, shape, events, {}, include_usage=False, with_details=False, with_explanation=False
        )
        request = LinkRequest(f"r{number}", "m", [1, 2, 3], "", SamplingParams(), StopConditions())
        link.submit(request, answer)
    slots = list(range(1, NUM_STREAMS + 1))
    link._on_step(StepFrame(starts=[SequenceStart(slot=slot, shard_id="s0") for slot in slots]))
    for choice in link._by_slot.values():
        cast(Any, choice.sink).events._uncork()
    step = StepFrame(slots=slots, token_ids=[7] * NUM_STREAMS, deltas=[" word"] * NUM_STREAMS)

    def relay() -> None:
        before = transport.num_writes
        link._on_step(step)
        assert transport.num_writes - before == NUM_STREAMS

    return relay


def calls_per_token(relay: Callable[[], None]) -> float:
    """Of Python functions and of C functions."""
    relay()
    count = 0

    def note(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        for _ in range(NUM_STEPS):
            relay()
    finally:
        sys.setprofile(None)
    return round(count / NUM_STEPS / NUM_STREAMS, 2)


def bytecodes_per_token(relay: Callable[[], None]) -> float:
    relay()
    count = 0

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in range(NUM_STEPS):
            relay()
    finally:
        sys.settrace(before)
    return round(count / NUM_STEPS / NUM_STREAMS, 1)


async def counts() -> dict[str, dict[str, float]]:
    halves = {"router": router_half(), "edge": edge_half()}
    return {
        name: {"calls": calls_per_token(relay), "bytecodes": bytecodes_per_token(relay)}
        for name, relay in halves.items()
    }


async def test_a_token_costs_no_more_than_it_did() -> None:
    """A call, an object or a look-up more per token is noticed by whoever adds it, on any machine."""
    baseline = json.loads(BASELINE.read_text())
    measured = await counts()
    for name, limits in baseline["per_token"].items():
        assert measured[name]["calls"] <= limits["calls"] * TOLERANCE, (name, measured)
        if baseline["python"] == f"{sys.version_info.major}.{sys.version_info.minor}":  # bytecodes are a version's own
            assert measured[name]["bytecodes"] <= limits["bytecodes"] * TOLERANCE, (name, measured)


if __name__ == "__main__":
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    sys.stdout.write(json.dumps({"python": python, "per_token": asyncio.run(counts())}, indent=2) + "\n")
