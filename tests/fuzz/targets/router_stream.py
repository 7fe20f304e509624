"""`RouterService.Connect` of a router with a real shard behind it, over gRPC and over its local socket.

Whatever a client sends, it is answered or refused as the client's fault, the core's books are right, and another client
is served.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from hypothesis import strategies as st

from kvloom.v1.error_reason_pb2 import ERROR_REASON_ENGINE_FAILED, ERROR_REASON_INTERNAL
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH
from kvloom.v1.router_service_pb2 import RouterServiceConnectRequest, RouterServiceConnectResponse
from shard_server.engines.sim_engine import SimEngine
from tests.fakes.redis_server import redis_server
from tests.fakes.router_world import MODEL, router_world
from tests.fakes.shard_world import VOCABULARY, shard_world, sim_config
from tests.fuzz.log_watch import LogWatch
from tests.fuzz.protobuf_frames import encoded, histories
from tests.fuzz.stream_peers import check_end, grpc_stream, local_stream, parsed
from tests.fuzz.target import Check, Target, check_message
from tests.waiting import eventually

METHOD = "/kvloom.v1.RouterService/Connect"

WINDOW_TOKENS = 64

WANTED = {
    "request_id": "r",
    "model": MODEL,
    "sampling": {"temperature": 0.0, "seed": "1"},
    "stop": {"max_tokens": 3, "stop": ["x"], "stop_token_ids": [5]},
}
SUBMIT = {"request": WANTED, "prompt_token_ids": [1, 2, 3], "choices": [{"slot": 1}]}
TWO_CHOICES = {
    "request": {**WANTED, "request_id": "s"},
    "prompt_token_ids": [1, 2, 3],
    "choices": [{"slot": 2}, {"slot": 3, "index": 1, "output_token_ids": [7]}],
}
PACKED = {
    **SUBMIT,
    "request": {**WANTED, "request_id": "p"},
    "prompt_token_ids": [],
    "packed_prompt_token_ids": "AQAAAAIAAAA=",
}
FIRST = [{"hello": {"client_id": "c"}}, {"hello": {"client_id": "c", "link_id": "l", "lost": [{"request_id": "r"}]}}]
LATER = [
    {"submits": [SUBMIT]},
    {"submits": [TWO_CHOICES, PACKED]},
    {"cancel_slots": [1, 2]},
    {"lost": [{"request_id": "r", "num_received_tokens": "1", "link_id": "l"}]},
]


@contextlib.asynccontextmanager
async def open_router(_watch: LogWatch) -> AsyncIterator[Check]:
    with redis_server() as redis:
        async with router_world(redis.connection_url) as world:
            config = sim_config(step_ms=0.0, max_model_len=WINDOW_TOKENS, max_batch=8)
            config.redis = world.config.redis
            world.config.router.health.enabled = False  # a shard is not to be judged by what a fuzzer makes it do
            engine = SimEngine(MODEL, config.shard, VOCABULARY, frozenset({2}))
            async with shard_world(config, engine):
                await world.start_router()
                witness = await world.connect("witness")
                await world.wait_for_shards(witness, 1)
                async with grpc.aio.insecure_channel(world.address) as channel:

                    async def check(value: Any) -> None:
                        frames = [encoded(frame, RouterServiceConnectRequest) for frame in value["frames"]]
                        if value["over"] == "grpc":
                            end = await grpc_stream(channel, METHOD, frames)
                        else:
                            end = await local_stream(world.address, frames)
                        check_end(end)
                        for frame in end.frames:
                            _check_finishes(parsed(frame, RouterServiceConnectResponse))
                        answer = await world.ask(witness, [1, 2, 3], 2)
                        assert answer.finish.reason == FINISH_REASON_LENGTH
                        await eventually(lambda: world.server._core.is_idle, "the end of all requests")
                        world.server._core.check_integrity()

                    yield check


def _check_finishes(response: RouterServiceConnectResponse) -> None:
    for finish in response.step.finishes:
        if finish.HasField("error"):
            assert finish.error.reason not in (ERROR_REASON_INTERNAL, ERROR_REASON_ENGINE_FAILED), finish
            check_message(finish.error.message)


TARGET = Target(
    "router_stream",
    st.fixed_dictionaries(
        {
            "over": st.sampled_from(["grpc", "local"]),
            "frames": histories(RouterServiceConnectRequest, FIRST, LATER),
        }
    ),
    open_router,
    suite_examples=30,
)
