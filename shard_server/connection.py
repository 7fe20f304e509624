"""One router's stream, without gRPC: its slots, the frame that is being filled, the frames that wait to be written."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from kvloom.errors import KvloomError
from kvloom.transport.frame_writer import FrameWriter
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart, StepFrame, TokenLogprobs
from kvloom.v1.kv_event_pb2 import KvEventBatch
from kvloom.v1.shard_service_pb2 import LoadReport, ShardServiceConnectResponse
from shard_server.frame_merge import take_merged

if TYPE_CHECKING:
    from shard_server.sequences import LiveSequence

MAX_PENDING_FRAMES: Final = 4096
"""More than this unwritten (20 s at 5 ms a step) and the router is given up: it reads too slowly, or not at all."""

MIN_INTERVAL_SECONDS: Final = 0.002
"""Between two frames. No model decodes this fast; an engine that does would wake its routers for every step."""


class StepParts:
    """What is to become a StepFrame; see there for the fields."""

    __slots__ = ("deltas", "finishes", "logprobs", "num_tokens", "slots", "starts", "token_ids", "uneven")

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.num_tokens: list[int] = []
        self.uneven = False
        """Some entry does not have exactly one token."""
        self.token_ids: list[int] = []
        self.deltas: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.starts: list[SequenceStart] = []
        self.finishes: list[SequenceFinish] = []

    def __bool__(self) -> bool:
        return bool(self.slots or self.finishes or self.starts)

    def to_proto(self) -> StepFrame:
        return StepFrame(
            slots=self.slots,
            num_tokens=self.num_tokens if self.uneven else (),
            token_ids=self.token_ids,
            deltas=self.deltas,
            logprobs=self.logprobs,
            starts=self.starts,
            finishes=self.finishes,
        )


class RouterConnection:
    """Fed by the EngineMultiplexer, emptied by the servicer's writer. Nothing here waits for the router."""

    def __init__(self, router_id: str, origin: int, max_pending_frames: int = MAX_PENDING_FRAMES) -> None:
        self.router_id = router_id
        self.origin = origin
        """Marks this stream's sequences in the engine; another stream of the same router has another."""
        self.by_slot: dict[int, LiveSequence] = {}
        self.parts = StepParts()
        """Of the engine step (or the router's frame) that is being handled."""
        self.ended: asyncio.Future[KvloomError | None] = asyncio.get_running_loop().create_future()
        """Set when this side ends the stream: None in good order, once all frames are written."""
        self._max_pending_frames = max_pending_frames
        self._pending: deque[ShardServiceConnectResponse] = deque()
        self._writer: FrameWriter[ShardServiceConnectResponse] | None = None

    def send_step(self, kv_events: KvEventBatch | None = None, load: LoadReport | None = None) -> None:
        """Everything new as one frame; nothing new, no frame."""
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
        """End the stream: at once with an error, else when all frames are written."""
        if not self.ended.done():
            self.ended.set_result(error)
        if error is not None:
            self._pending.clear()
        if self._writer is not None:
            self._writer.finish()

    async def write_frames(self, stream: Any) -> None:
        """To a stream of gRPC's or a LocalStream, until its end. Raises AioRpcError."""
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
