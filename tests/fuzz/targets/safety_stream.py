"""`SafetyService.Screen` with a policy that blocks something, over gRPC and over a local socket.

Whatever a router sends, it is answered or refused in words, and another router's texts are screened.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import grpc
from hypothesis import strategies as st

from kvloom.v1.safety_service_pb2 import CheckWish, ClassifyRequest, ScreenRequest, ScreenResponse
from kvloom.v1.safety_service_pb2_grpc import SafetyServiceStub, add_SafetyServiceServicer_to_server
from kvloom_common.process.service import SERVER_OPTIONS, bind
from kvloom_common.transport.checked_server import CheckedServer
from kvloom_common.transport.local_server import LocalServer
from safety_svc.policy_file import PolicyFile
from safety_svc.server import SafetyServicer
from tests.fuzz.log_watch import LogWatch
from tests.fuzz.protobuf_frames import encoded, histories
from tests.fuzz.stream_peers import check_end, grpc_stream, local_stream, parsed
from tests.fuzz.target import Check, Target

METHOD = "/kvloom.v1.SafetyService/Screen"
POLICY = """
[[rules]]
name = "phrase"
phrases = ["launch code", "é🙂"]

[[rules]]
name = "pattern"
patterns = ['A[0-9]{3}', '(?i)x{3}']
prefixes = ["A", "x", "X"]
max_length = 8
"""

FRAMES = [
    {"prompts": [{"check_id": 1, "text": "hello"}, {"check_id": 2, "text": "the launch code", "tenant": "t"}]},
    {"slots": [1, 2], "deltas": ["launch ", "A12"]},
    {"slots": [1, 2], "deltas": ["code", "3"]},
    {"close_slots": [1, 2, 3]},
    {"cleared_texts": [{"slot": 4, "num_chars": 3, "last_char": "a"}], "slots": [4], "deltas": ["b"]},
]


@contextlib.asynccontextmanager
async def open_safety(_watch: LogWatch) -> AsyncIterator[Check]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as policy:
        policy.write(POLICY)
        policy.flush()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        servicer = SafetyServicer(PolicyFile(policy.name))
        add_SafetyServiceServicer_to_server(servicer, CheckedServer(server))
        address = bind(server, "127.0.0.1", 0)
        local = LocalServer(lambda stream: servicer.Screen(None, stream), ScreenRequest)
        await local.start(address)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = SafetyServiceStub(channel)

                async def check(value: Any) -> None:
                    frames = [encoded(frame, ScreenRequest) for frame in value["frames"]]
                    if value["over"] == "grpc":
                        end = await grpc_stream(channel, METHOD, frames)
                    else:
                        end = await local_stream(address, frames)
                    check_end(end)
                    for frame in end.frames:
                        parsed(frame, ScreenResponse)
                    judged = await stub.Classify(ClassifyRequest(texts=["the launch code"], check=CheckWish()))
                    assert judged.results[0].HasField("finding")
                    assert not servicer._connections, "a stream that has ended is still served"

                yield check
        finally:
            await server.stop(0)
            await local.stop(0)


TARGET = Target(
    "safety_stream",
    st.fixed_dictionaries(
        {"over": st.sampled_from(["grpc", "local"]), "frames": histories(ScreenRequest, FRAMES, FRAMES)}
    ),
    open_safety,
    suite_examples=40,
)
