"""One router's stream, without gRPC: its slots, the frame being filled, and the frames that wait to be written."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from kvloom.errors import KvloomError
from kvloom.transport.frame_writer import FrameWriter
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.kv_event_pb2 import KvEventBatch
from kvloom.v1.shard_service_pb2 import LoadReport, ShardServiceConnectResponse
from shard_server.live_sequences import LiveSequence
from shard_server.step_frames import StepParts, take_merged

MAX_PENDING_FRAMES: Final = 4096
"""A router with more unwritten frames than this (20 s at 5 ms a step) is disconnected: it reads too slowly, or not at
all."""

MIN_INTERVAL_SECONDS: Final = 0.002
"""The shortest time between two frames. No model decodes this fast; an engine that does (the simulator) would wake its
routers for every step."""


class RouterConnection:
    """The EngineMultiplexer fills it and the servicer's writer empties it. Nothing here waits for the router."""

    def __init__(self, router_id: str, origin: int, max_pending_frames: int = MAX_PENDING_FRAMES) -> None:
        self.router_id = router_id
        self.origin = origin
        """Marks the sequences of this stream in the engine; every stream has its own, even two of the same router."""
        self.by_slot: dict[int, LiveSequence] = {}
        self.parts = StepParts()
        """The output of the engine step (or the router's frame) that is being handled."""
        self.ended: asyncio.Future[KvloomError | None] = asyncio.get_running_loop().create_future()
        """Set when this side ends the stream. None means a clean end, after all waiting frames have been written."""
        self._max_pending_frames = max_pending_frames
        self._pending: deque[ShardServiceConnectResponse] = deque()
        self._writer: FrameWriter[ShardServiceConnectResponse] | None = None

    def send_step(self, kv_events: KvEventBatch | None = None, load: LoadReport | None = None) -> None:
        """Queue everything new as one frame. Without anything new, no frame is queued."""
        parts = self.parts
        step = None
        if parts:
            step = parts.to_proto()
            self.parts = StepParts()
        if step is not None or kv_events is not None or load is not None:
            self.send(ShardServiceConnectResponse(step=step, kv_events=kv_events, load=load))

    def send(self, frame: ShardServiceConnectResponse) -> None:
        if self.ended.done():
            return
        if len(self._pending) >= self._max_pending_frames:
            self.end(
                KvloomError(
                    ErrorReason.ERROR_REASON_CLIENT_TOO_SLOW,
                    f"This stream was not read fast enough: {len(self._pending)} frames were waiting for it.",
                )
            )
            return
        self._pending.append(frame)
        if self._writer is not None:
            self._writer.wake()

    def end(self, error: KvloomError | None = None) -> None:
        """End the stream: with an error at once, without one after all waiting frames have been written."""
        if not self.ended.done():
            self.ended.set_result(error)
        if error is not None:
            self._pending.clear()
        if self._writer is not None:
            self._writer.finish()

    async def write_frames(self, stream: Any) -> None:
        """Write to `stream` (a gRPC stream or a LocalStream) until it ends. Raises AioRpcError."""
        self._writer = FrameWriter(stream, self._take, MIN_INTERVAL_SECONDS)
        self._writer.wake()
        if self.ended.done():
            self._writer.finish()
        await self._writer.run()

    def _take(self) -> ShardServiceConnectResponse | None:
        if not self._pending:
            return None
        frame = take_merged(self._pending)
        if self._pending and self._writer is not None:
            self._writer.wake()
        return frame
