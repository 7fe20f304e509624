"""An engine's sequences that have not finished, and what can happen to one: started, flushed, cancelled, finished.

A sequence is no longer here as soon as its finish is in a frame; what the engine still says about it is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvloom.errors import KvloomError
from kvloom.v1 import generation_pb2
from shard_server.cancelling_sequences import CancellingSequences
from shard_server.engines.base import Engine
from shard_server.metrics import ShardMetrics
from shard_server.sequences import LiveSequence


class LiveSequences:
    """Of one engine, of all routers."""

    def __init__(self, engine: Engine, metrics: ShardMetrics, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock
        self.by_request_id: dict[str, LiveSequence] = {}
        """The engine's request ids."""
        self.cancelling_sequences = CancellingSequences(metrics)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_in_engine(self) -> int:
        """Also those that have finished, of which the engine does not know yet."""
        return len(self.by_request_id) + len(self.cancelling_sequences)

    async def wait_idle(self) -> None:
        """Returns when there is none."""
        await self._idle.wait()

    def add(self, sequence: LiveSequence) -> None:
        self.by_request_id[sequence.request.request_id] = sequence
        sequence.connection.by_slot[sequence.slot] = sequence
        self._idle.clear()

    def start(self, sequence: LiveSequence, num_cached_tokens: int, queue_time_seconds: float, now: float) -> None:
        """The engine has begun with it."""
        sequence.num_cached_tokens = num_cached_tokens
        sequence.connection.parts.starts.append(
            generation_pb2.SequenceStart(
                slot=sequence.slot, num_cached_tokens=num_cached_tokens, queue_time_seconds=queue_time_seconds
            )
        )
        self._metrics.on_start(
            len(sequence.request.prompt_token_ids), num_cached_tokens, queue_time_seconds, now - sequence.received_at
        )

    def flush(self, sequence: LiveSequence) -> None:
        """What text is left, as an entry without tokens."""
        text = sequence.detokenizer.flush()
        if text:
            parts = sequence.connection.parts
            parts.slots.append(sequence.slot)
            parts.num_tokens.append(0)
            parts.uneven = True
            parts.deltas.append(text)

    def cancel_in_engine(self, sequence: LiveSequence) -> None:
        """Its answer is complete; it is to be finished besides."""
        self.cancelling_sequences.add(sequence.request.request_id)
        self._engine.cancel(sequence.request.request_id)

    def cancel_unwanted(self, sequence: LiveSequence, num_arrived_tokens: int) -> None:
        """Nobody wants what comes behind its first `num_arrived_tokens`: it is cancelled and finished."""
        self.cancel_in_engine(sequence)
        num_late_tokens = max(0, sequence.num_output_tokens - num_arrived_tokens)
        self.cancelling_sequences.add_unwanted(sequence.request.request_id, num_late_tokens)
        self.finish(sequence, generation_pb2.FINISH_REASON_CANCELLED)

    def finish(
        self,
        sequence: LiveSequence,
        reason: generation_pb2.FinishReason.ValueType,
        error: KvloomError | None = None,
    ) -> None:
        """Its end goes into its router's next frame."""
        del self.by_request_id[sequence.request.request_id]
        connection = sequence.connection
        del connection.by_slot[sequence.slot]
        finish = sequence.finish(reason)
        if error is not None:
            finish.error.CopyFrom(error.to_proto())
        connection.parts.finishes.append(finish)
        self._metrics.on_finish(reason, self._clock() - sequence.received_at)
        if not self.by_request_id:
            self._idle.set()
