"""What a frame and a token cost, from the bytes that are read to those that are written, may not grow unnoticed: calls
and bytecodes are counted, never seconds.

`python -m tests.unit.cost.test_data_plane_cost` prints the counts; put them into tests/baselines/data_plane_cost.json
when a change is meant to cost what it costs, and say in the commit what it buys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

import aiohttp
from aiohttp import web
from google.protobuf.message import Message

from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.formatting.response_formatter import Envelope
from edge_http.openai.response_formatters import ChatFormatter
from edge_http.wire.sse import EventStream, WriteCoalescer
from kvloom.router_link.link import GrpcRouterLink
from kvloom.router_link.tracked_request import TrackedRequest
from kvloom.transport.local_frames import HEAD, MESSAGE
from kvloom.transport.local_stream import LocalStream
from kvloom.v1.generation_pb2 import SamplingParams, SequenceStart, StepFrame, StopConditions
from kvloom.v1.kv_event_pb2 import BlockStored, KvEvent, KvEventBatch
from kvloom.v1.router_service_pb2 import RouterServiceConnectRequest, RouterServiceConnectResponse
from kvloom.v1.shard_service_pb2 import LoadReport, ShardServiceConnectResponse
from kvloom_common.discovery.records import ShardRecord
from router.core.actions import SubmitAttempt
from router.core.events import KvSnapshotArrived, SafetyUp
from router.core_driver import CoreDriver
from router.links.client_link import ClientLink
from router.links.prefilter import Prefilter
from router.links.shard_link import ShardLink
from tests.fakes.core_rig import CoreRig, only
from tests.fakes.cost_counting import (
    NUM_ROUNDS,
    CountingTransport,
    Counts,
    NoopObserver,
    assert_no_dearer,
    bytecodes_of,
    calls_of,
    print_baseline,
)
from tests.fakes.link_requests import link_request

NUM_STREAMS: Final = 32


class ConnectedRequest:
    """What an EventStream asks of a request."""

    version = aiohttp.HttpVersion11
    keep_alive = True

    def __init__(self, transport: CountingTransport) -> None:
        self.transport = transport


def stream_of(in_type: type[Any], transport: CountingTransport) -> LocalStream[Any, Any]:
    """A local stream without a socket."""
    stream: LocalStream[Any, Any] = LocalStream(in_type, lambda _stream: None)
    stream._transport = cast(asyncio.Transport, transport)
    return stream


def framed(message: Message) -> bytes:
    payload = message.SerializeToString()
    return HEAD.pack(len(payload), MESSAGE) + payload


def delivering(stream: LocalStream[Any, Any], on_message: Callable[[Any], None]) -> Callable[[bytes], None]:
    """As if a caller awaited `deliver`. Fails when a message does."""
    stream._reader = asyncio.get_running_loop().create_future()
    stream._on_message = on_message

    def take(data: bytes) -> None:
        stream.data_received(data)
        if stream._reader is None or stream._reader.done():
            raise AssertionError("the stream has broken")

    return take


def router_half(num_streams: int, *, is_gated: bool = True) -> Callable[[], None]:
    """A shard's frame, with a token for each of its answers, a load report, and two blocks that its cache has stored,
    to the bytes of the frame for their client."""
    rig = CoreRig(safety=None, max_queued_requests=1000)
    rig.now = asyncio.get_running_loop().time()  # the driver's clock: nothing has expired
    rig.handle(SafetyUp(False, is_gated, Prefilter(["forbidden"], ["not this"])))
    rig.add_shard(max_batch=num_streams, max_model_len=1000, num_blocks=10_000)
    rig.handle(KvSnapshotArrived("s0", 0, ()))
    driver = CoreDriver(rig.core, cast(Any, NoopObserver()))
    transport = CountingTransport()
    client = ClientLink(
        driver,
        cast(Any, None),
        cast(Any, stream_of(RouterServiceConnectRequest, transport)),
        cast(Any, NoopObserver()),
    )
    driver.add_client("c", client)
    slots: list[int] = []
    for number in range(num_streams):
        actions = rig.submit(f"r{number}", slots=[number], max_tokens=500)
        slots += [choice.slot for choice in only(actions, SubmitAttempt).choices]
    for slot in slots:
        rig.start("s0", slot)
    shard = ShardLink(ShardRecord("s0", "127.0.0.1:1", "m", "i"), "router", driver)
    take = delivering(stream_of(ShardServiceConnectResponse, CountingTransport()), shard._on_frame)
    step = StepFrame(slots=slots, token_ids=[7] * num_streams, deltas=[" word"] * num_streams)
    load = LoadReport(num_running=num_streams, num_own_running=num_streams, num_available_blocks=9_000)

    def frame(number: int) -> bytes:
        blocks = [KvEvent(block_stored=BlockStored(block_hashes=[2 * number + i])) for i in range(2)]
        kv_events = KvEventBatch(number=number, events=blocks)
        return framed(ShardServiceConnectResponse(step=step, load=load, kv_events=kv_events))

    frames = [frame(number) for number in range(NUM_ROUNDS + 1, 0, -1)]

    def relay() -> None:
        before = transport.num_writes
        take(frames.pop())
        client._writer._write_now()  # as the event loop does at the end of the turn
        assert transport.num_writes - before == 1

    return relay


def edge_half(num_streams: int) -> Callable[[], None]:
    """The bytes of a router's frame, with a token for each stream, to the streams' sockets."""
    link = GrpcRouterLink("127.0.0.1:1", "edge")
    link._connected = True
    transport = CountingTransport()
    envelope = Envelope(id="chatcmpl-1", model="m", system_fingerprint="fp", num_choices=1, include_usage=False)
    answers: list[EventStream] = []
    for number in range(num_streams):
        events = EventStream(cast(web.BaseRequest, ConnectedRequest(transport)), 1 << 20, WriteCoalescer())
        answers.append(events)
        shape = ChatFormatter(envelope, cast(Any, None))
        answer = StreamedAnswer([5], 1, shape, events, {}, with_details=False, with_explanation=False)
        request = link_request(f"r{number}", "m", [1, 2, 3], "", SamplingParams(), StopConditions())
        link.submit(request, TrackedRequest(number, request, answer, cast(Any, NoopObserver()), b""))
    slots = list(range(1, num_streams + 1))
    link._on_step(StepFrame(starts=[SequenceStart(slot=slot, shard_id="s0") for slot in slots]))
    for events in answers:
        events.uncork()
    take = delivering(stream_of(RouterServiceConnectResponse, CountingTransport()), link._on_frame)
    step = StepFrame(slots=slots, token_ids=[7] * num_streams, deltas=[" word"] * num_streams)
    data = framed(RouterServiceConnectResponse(step=step))

    def relay() -> None:
        before = transport.num_writes
        take(data)
        assert transport.num_writes - before == num_streams

    return relay


async def counts() -> Counts:
    """What a frame costs with no more than one token in it, and each further token."""
    counted: Counts = {}
    for name, half in {"router": router_half, "edge": edge_half}.items():
        for unit, count in {"calls": calls_of, "bytecodes": bytecodes_of}.items():
            small, large = count(half(1)), count(half(NUM_STREAMS))
            counted.setdefault(f"{name} per frame", {})[unit] = round(small, 1)
            counted.setdefault(f"{name} per token", {})[unit] = round((large - small) / (NUM_STREAMS - 1), 2)
    return counted


async def test_frames_and_tokens_cost_no_more_than_they_did() -> None:
    """A call, an object or a look-up more per frame or token is noticed when it is added, on any machine."""
    assert_no_dearer("data_plane_cost", await counts())


async def test_the_gate_costs_a_frame_something_and_a_token_nothing() -> None:
    """Text without suspicion is cleared by one search for all answers of a frame."""

    def cost_of_the_gate(num_streams: int) -> float:
        gated, shown = (bytecodes_of(router_half(num_streams, is_gated=is_gated)) for is_gated in (True, False))
        return gated - shown

    assert cost_of_the_gate(NUM_STREAMS) < cost_of_the_gate(1) + NUM_STREAMS


if __name__ == "__main__":
    print_baseline(counts)
