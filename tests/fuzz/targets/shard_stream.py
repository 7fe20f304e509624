"""`ShardService.Connect` of a shard with the simulated engine, over gRPC and over its local socket.

Whatever a router of another version or a foreign one sends, it is refused in words, no sequence of its stays in the
engine, and another router is served.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from hypothesis import strategies as st

from kvloom.v1.error_reason_pb2 import ERROR_REASON_ENGINE_FAILED, ERROR_REASON_INTERNAL
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH
from kvloom.v1.shard_service_pb2 import GetInfoRequest, ShardServiceConnectRequest, ShardServiceConnectResponse
from tests.fakes.shard_world import shard_world, sim_config
from tests.fuzz.log_watch import LogWatch
from tests.fuzz.protobuf_frames import encoded, histories
from tests.fuzz.stream_peers import check_end, grpc_stream, local_stream, parsed
from tests.fuzz.target import Check, Target, check_message

METHOD = "/kvloom.v1.ShardService/Connect"
WITNESS_SLOT = 1

SUBMIT = {
    "request_id": "r",
    "attempt_id": 1,
    "prompt_token_ids": [1, 2, 3],
    "sampling": {"temperature": 0.0, "seed": "1"},
    "stop": {"max_tokens": 3, "stop": ["w"], "stop_token_ids": [5]},
    "choices": [{"slot": 1}],
    "cache_salt": "t",
}
TWO_CHOICES = {
    **SUBMIT,
    "choices": [{"slot": 2}, {"slot": 3, "index": 1, "output_token_ids": [7], "num_delivered_chars": 1}],
}
PACKED = {**SUBMIT, "prompt_token_ids": [], "packed_prompt_token_ids": "AQAAAAIAAAA=", "choices": [{"slot": 4}]}
FIRST = [{"hello": {"router_id": "c"}}]
LATER = [
    {"submits": [SUBMIT]},
    {"submits": [TWO_CHOICES, PACKED]},
    {"cancel_slots": [1, 2]},
    {"want_kv_snapshot": True},
    {"discarded_sequences": [{"slot": 1, "num_output_tokens": 1}]},
]


@contextlib.asynccontextmanager
async def open_shard(_watch: LogWatch) -> AsyncIterator[Check]:
    async with shard_world(sim_config(step_ms=0.0, max_model_len=64, max_batch=8)) as world:
        witness = await world.router("witness")

        async def check(value: Any) -> None:
            frames = [encoded(frame, ShardServiceConnectRequest) for frame in value["frames"]]
            if value["over"] == "grpc":
                end = await grpc_stream(world.channel, METHOD, frames)
            else:
                end = await local_stream(world.address, frames)
            check_end(end)
            for frame in end.frames:
                _check_finishes(parsed(frame, ShardServiceConnectResponse))
            await witness.submit(WITNESS_SLOT, [1, 2, 3], max_tokens=2, ignore_eos=True)
            assert (await witness.finish_of(WITNESS_SLOT)).reason == FINISH_REASON_LENGTH
            witness.forget(WITNESS_SLOT)
            await _wait_until_idle(world.stub)

        yield check


async def _wait_until_idle(stub: Any) -> None:
    """Raises TimeoutError, by the session, if a sequence of a router that is gone stays."""
    while True:
        load = (await stub.GetInfo(GetInfoRequest())).load
        if not load.num_running and not load.num_waiting:
            return


def _check_finishes(response: ShardServiceConnectResponse) -> None:
    for finish in response.step.finishes:
        if finish.HasField("error"):
            assert finish.error.reason not in (ERROR_REASON_INTERNAL, ERROR_REASON_ENGINE_FAILED), finish
            check_message(finish.error.message)


TARGET = Target(
    "shard_stream",
    st.fixed_dictionaries(
        {"over": st.sampled_from(["grpc", "local"]), "frames": histories(ShardServiceConnectRequest, FIRST, LATER)}
    ),
    open_shard,
    suite_examples=30,
)
