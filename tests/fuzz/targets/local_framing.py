"""The framing of local streams (kvloom/transport/local_frames.py), byte by byte, at a shard's socket.

Torn, oversized, unknown and foreign frames end their own stream, and a well-behaved one is served.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from hypothesis import strategies as st

from kvloom.transport.local_frames import END, HEAD, MAX_MESSAGE_BYTES, MESSAGE, PING, PONG
from kvloom.v1.shard_service_pb2 import RouterHello, ShardServiceConnectRequest
from tests.fakes.shard_world import shard_world, sim_config
from tests.fuzz.byte_edits import EDITS, PIECES, edited
from tests.fuzz.log_watch import LogWatch
from tests.fuzz.stream_peers import local_bytes
from tests.fuzz.target import Check, Target, bytes_of, text_of

HELLO = ShardServiceConnectRequest(hello=RouterHello(router_id="r")).SerializeToString()
SNAPSHOT = ShardServiceConnectRequest(want_kv_snapshot=True).SerializeToString()
KINDS = st.sampled_from([MESSAGE, MESSAGE, PING, PONG, END, 4, 255])
PAYLOADS = st.sampled_from([HELLO, SNAPSHOT, b""]).map(text_of) | PIECES
LIES = st.sampled_from([0, 0, 0, 1, -1, 100, MAX_MESSAGE_BYTES, 2**31])
FRAMES = st.lists(st.tuples(KINDS, PAYLOADS, LIES).map(list), max_size=6)


def framed(value: Any) -> bytes:
    """Each frame is [kind, payload, how much longer its header says that it is]."""
    frames = [HEAD.pack(max(0, len(payload) + lie), kind) + bytes_of(payload) for kind, payload, lie in value["frames"]]
    return edited(b"".join(frames), value["edits"])


@contextlib.asynccontextmanager
async def open_socket(_watch: LogWatch) -> AsyncIterator[Check]:
    async with shard_world(sim_config(step_ms=0.0)) as world:

        async def check(value: Any) -> None:
            await local_bytes(world.address, framed(value) + HEAD.pack(0, END))
            hello = HEAD.pack(len(HELLO), MESSAGE) + HELLO
            assert await local_bytes(world.address, hello, last=HEAD.pack(0, END)), "no hello for a well-behaved router"

        yield check


TARGET = Target(
    "local_framing", st.fixed_dictionaries({"frames": FRAMES, "edits": EDITS}), open_socket, suite_examples=50
)
