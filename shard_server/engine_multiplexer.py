"""Connects one engine to all routers: accepts their submits, and turns every engine step into one frame per router.

Everything is synchronous except `run`, which consumes the engine's steps. All calls are made on one event loop, so no
locks are needed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import structlog

from kvloom.errors import invalid_argument, protocol_violation
from kvloom.guide import GUIDE_FIELD
from kvloom.v1 import generation_pb2, kv_event_pb2
from kvloom.v1.kv_event_pb2 import KvEventBatch, KvSnapshot
from kvloom.v1.shard_service_pb2 import (
    AdapterList,
    LoadReport,
    ShardHello,
    ShardInfo,
    ShardServiceConnectRequest,
    ShardServiceConnectResponse,
)
from kvloom_common.process.access_log import NO_ACCESS_LOG, AccessLog
from kvloom_common.text.detokenizer import TokenText
from shard_server.connection import MAX_PENDING_FRAMES, RouterConnection
from shard_server.engines.base import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Engine,
    KvEvent,
    SequenceEnd,
    SequenceFinishReason,
    StepOutput,
)
from shard_server.live_sequences import LiveSequences, SequenceObserver, logprobs_to_proto
from shard_server.load_reporter import LoadReporter
from shard_server.metrics import ShardMetrics
from shard_server.sequence_admission import SequenceAdmission, engine_failed, stopping
from shard_server.served_adapters import ServedAdapters

log = structlog.get_logger()


_FINISH_REASONS: Final = {
    SequenceFinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    SequenceFinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    SequenceFinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
    SequenceFinishReason.ERROR: generation_pb2.FINISH_REASON_ERROR,
}


class EngineMultiplexer:
    """`engine` must have started. `max_waiting` is the number of sequences that are accepted beyond a full batch."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenText,
        info: ShardInfo,
        metrics: ShardMetrics,
        max_waiting: int,
        *,
        max_pending_frames: int = MAX_PENDING_FRAMES,
        clock: Callable[[], float] = time.monotonic,
        access_log: AccessLog = NO_ACCESS_LOG,
        tracer: SequenceObserver | None = None,
    ) -> None:
        self.info = info
        self._engine = engine
        self._metrics = metrics
        self._max_pending_frames = max_pending_frames
        self._clock = clock
        self._kv = KvMirror()
        self._connections: list[RouterConnection] = []
        self._origins = itertools.count(1)
        self._load = LoadReporter(engine.info, clock)
        self._live = LiveSequences(engine, metrics, clock, access_log, tracer)
        self.adapters = ServedAdapters(metrics, self._tell_adapters)
        max_sequences = engine.info.max_batch + max_waiting
        self._intake = SequenceAdmission(engine, tokenizer, self._live, self._load, max_sequences, clock, self.adapters)
        self._report_timer: asyncio.TimerHandle | None = None
        self._has_engine = asyncio.Event()
        self._has_engine.set()
        self._last_token_step_at: float | None = None

    # -- routers ------------------------------------------------------------------------------------------------------

    def connect(self, router_id: str) -> RouterConnection:
        """Open a stream; its first frame is the hello with a snapshot. Raises KvloomError when the engine has died."""
        if self._intake.engine_has_failed:
            raise engine_failed()
        connection = RouterConnection(router_id, next(self._origins), self._max_pending_frames)
        hello = ShardHello(info=self.info, reads_packed_token_ids=True)
        connection.send(
            ShardServiceConnectResponse(
                hello=hello, kv_snapshot=self._kv.snapshot(), load=self.load_report(), adapters=self.adapters.list
            )
        )
        self._connections.append(connection)
        self._metrics.on_routers(len(self._connections))
        return connection

    def disconnect(self, connection: RouterConnection) -> None:
        """The stream has ended: its sequences are cancelled and their blocks freed."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        for sequence in list(connection.by_slot.values()):
            self._live.cancel_unwanted(sequence, sequence.num_output_tokens)
        self._metrics.on_routers(len(self._connections))

    def receive(self, connection: RouterConnection, frame: ShardServiceConnectRequest) -> None:
        """Handle a router's frame, submits before cancels. Raises KvloomError (PROTOCOL_VIOLATION)."""
        if frame.HasField("hello"):
            raise protocol_violation("Only the first frame carries a hello.")
        for submit in frame.submits:
            self._intake.submit(connection, submit)
        num_arrived = {entry.slot: entry.num_output_tokens for entry in frame.discarded_sequences}
        for slot in frame.cancel_slots:
            sequence = connection.by_slot.get(slot)
            if sequence is None:  # its finish is on its way, or has arrived
                continue
            if sequence.request.prefill_only:
                # Its KV may be complete and wait to be fetched: it ends when the engine says so.
                self._engine.cancel(sequence.request.request_id)
            elif slot in num_arrived:
                self._live.cancel_unwanted(sequence, num_arrived[slot])
            else:
                self._live.cancel_in_engine(sequence)
                self._live.finish(sequence, generation_pb2.FINISH_REASON_CANCELLED)
        connection.send_step()
        if frame.submits and len(self._connections) > 1:
            self._report_soon()
        if frame.want_kv_snapshot:
            connection.send(ShardServiceConnectResponse(kv_snapshot=self._kv.snapshot()))

    # -- operators ----------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self._load.draining

    @property
    def router_ids(self) -> list[str]:
        """The routers that are connected."""
        return [connection.router_id for connection in self._connections]

    def set_draining(
        self, draining: bool, *, hand_over: bool = False, empty_within_seconds: float | None = None
    ) -> None:
        """While draining, new sequences are rejected; with `hand_over`, routers move running ones to other shards, and
        with `empty_within_seconds` those that will not have ended by then.

        Routers are notified at once.
        """
        empty_at = None if empty_within_seconds is None else self._clock() + empty_within_seconds
        wanted = (draining, hand_over, empty_at)
        load = self._load
        if wanted != (load.draining, load.hand_over, load.empty_at):
            load.draining, load.hand_over, load.empty_at = wanted
            self._report_load()

    def set_withdrawn(self, withdrawn: bool) -> None:
        """Says if the model is about to be withdrawn. Routers are notified at once."""
        if withdrawn != self._load.withdrawn:
            self._load.withdrawn = withdrawn
            self._report_load()

    def announce_sleep(self, asleep: bool) -> None:
        """Says if the shard sleeps, or is about to. Routers are notified at once."""
        if asleep != self._load.asleep:
            self._load.asleep = asleep
            self._report_load()

    @property
    def asleep(self) -> bool:
        """True while the engine has been given up."""
        return not self._has_engine.is_set()

    def give_up_engine(self) -> None:
        """The engine is about to be closed, and with it its cached blocks go; `use` follows later. No sequence may be
        live."""
        self._has_engine.clear()
        self.adapters.give_up_engine()
        kv_events = self._kv.apply([AllBlocksCleared()])
        for connection in self._connections:
            connection.send_step(kv_events)

    def use(self, engine: Engine) -> None:
        """Continue with an engine that has started and has the sizes of the one that was closed."""
        self._engine = engine
        self._live.use(engine)
        self._intake.use(engine)
        self._load.restart(engine.info)
        self._metrics.on_new_engine()
        self._last_token_step_at = None
        self._has_engine.set()

    def _tell_adapters(self, adapters: AdapterList) -> None:
        for connection in self._connections:
            connection.send(ShardServiceConnectResponse(adapters=adapters))

    def _report_load(self) -> None:
        for connection in self._connections:
            connection.send_step(load=self._load.report(connection.origin))

    def return_sequences(self) -> None:
        """Finish every sequence with DRAINING because the process ends; its router resumes it on another shard."""
        for sequence in list(self._live.by_request_id.values()):
            self._live.cancel_in_engine(sequence)
            self._live.finish(sequence, generation_pb2.FINISH_REASON_ERROR, stopping())
        for connection in self._connections:
            connection.send_step()

    async def wait_idle(self) -> None:
        """Returns when no sequence is live."""
        await self._live.wait_idle()

    def end_connections(self) -> None:
        """Close all streams cleanly, after the frames that wait to be written."""
        for connection in self._connections:
            connection.end()

    def load_report(self) -> LoadReport:
        """The load as a reader without sequences of its own receives it."""
        return self._load.report()

    @property
    def num_submitted(self) -> int:
        """The sequences that the engine has accepted."""
        return self._load.num_submitted

    # -- the engine ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Deliver steps until the engine is closed and none is to take its place. When the engine dies, every sequence
        finishes with ENGINE_FAILED and the engine's error is raised."""
        try:
            engine = None
            while engine is not self._engine:  # another one may have taken its place
                engine = self._engine
                async for output in engine.steps():
                    self._on_step(output)
                await self._has_engine.wait()
        except Exception:
            self._intake.engine_has_failed = True
            for sequence in list(self._live.by_request_id.values()):
                self._live.finish(sequence, generation_pb2.FINISH_REASON_ERROR, engine_failed())
            for connection in self._connections:
                connection.send_step()
            raise

    def _on_step(self, output: StepOutput) -> None:
        now = self._clock()
        live = self._live.by_request_id
        ends = {end.request_id: end for end in output.ends}
        for start in output.starts:
            sequence = live.get(start.request_id)
            if sequence is not None:
                self._live.start(sequence, start, now)
                num_prompt_tokens = len(sequence.request.prompt_token_ids)
                self._load.num_prompt_tokens += num_prompt_tokens
                self._load.num_cached_tokens += min(start.num_cached_tokens, num_prompt_tokens)
        for request_id, (num_drafted, num_accepted) in output.predictions.items():
            sequence = live.get(request_id)
            if sequence is not None:
                sequence.predicted = sequence.predicted[0] + num_drafted, sequence.predicted[1] + num_accepted
        num_tokens = num_discarded = 0
        for request_id, token_ids in _first_tokens_first(output):
            sequence = live.get(request_id)
            if sequence is None:
                num_discarded += len(token_ids)
                self._live.cancelling.note_tokens(request_id, len(token_ids))
                continue
            if request_id in ends or len(token_ids) != 1:
                token_ids, delta = sequence.push_until_stop(token_ids)
            else:
                delta = sequence.detokenizer.push(token_ids)
            end = ends.get(request_id)
            parts = sequence.connection.parts
            count = len(token_ids)
            if count != 1:
                parts.uneven = True
            parts.slots.append(sequence.slot)
            parts.num_tokens.append(count)
            parts.token_ids += token_ids
            num_tokens += count
            sequence.num_output_tokens += count
            if output.logprobs and request_id in output.logprobs:
                parts.logprobs += logprobs_to_proto(sequence.slot, output.logprobs[request_id][:count])
            if sequence.has_stop_strings and sequence.detokenizer.stop_string is not None:
                if end is None:
                    self._live.cancel_in_engine(sequence)
                self._live.finish(sequence, generation_pb2.FINISH_REASON_STOP)
            elif end is not None and end.reason in (SequenceFinishReason.STOP, SequenceFinishReason.LENGTH):
                delta += sequence.detokenizer.flush()
                self._live.finish(sequence, _FINISH_REASONS[end.reason], handoff=end.handoff)
            parts.deltas.append(delta)
        for end in output.ends:
            self._end(end)
        kv_events = self._kv.apply(output.kv_events) if output.kv_events else None
        self._load.num_output_tokens += num_tokens
        is_report_due = self._load.on_step(output.load, now)
        for connection in self._connections:
            connection.send_step(kv_events, self._load.report(connection.origin) if is_report_due else None)
        step_seconds = None
        if output.request_ids:
            if self._last_token_step_at is not None:
                step_seconds = now - self._last_token_step_at
            self._last_token_step_at = now if live else None
        self._metrics.on_step(output.load, num_tokens, num_discarded, self._kv.num_cached_blocks, step_seconds)

    def _report_soon(self) -> None:
        """Schedule a load report: other routers must learn of a submit even if the engine's step takes long."""
        if self._report_timer is None:
            delay_seconds = self._load.seconds_to_next(self._clock())
            self._report_timer = asyncio.get_running_loop().call_later(delay_seconds, self._report_submits)

    def _report_submits(self) -> None:
        self._report_timer = None
        if self._load.is_due_without_step(self._clock()):
            for connection in self._connections:
                connection.send_step(load=self._load.report(connection.origin))

    def _end(self, end: SequenceEnd) -> None:
        """Handle the engine's end of a sequence, which may have finished with its last tokens already."""
        self._live.cancelling.end(end.request_id)
        sequence = self._live.by_request_id.get(end.request_id)
        if sequence is None:
            return
        error = None
        if end.refusal:
            error = invalid_argument(f"The guide cannot be followed: {end.refusal}.", GUIDE_FIELD)
        elif end.reason is SequenceFinishReason.ERROR:
            log.error("sequence_failed", sequence_id=end.request_id, error=end.error, **sequence.names)
            error = engine_failed()
        elif end.reason is not SequenceFinishReason.CANCELLED:
            self._live.flush(sequence)
        self._live.finish(sequence, _FINISH_REASONS[end.reason], error, end.embedding, end.handoff)


def _first_tokens_first(output: StepOutput) -> Iterable[tuple[str, list[int]]]:
    """A step's entries, those with a first token in front: a client that waits for its first token waits longest."""
    entries = zip(output.request_ids, output.token_ids, strict=True)
    if not output.starts:
        return entries
    started = {start.request_id for start in output.starts}
    return sorted(entries, key=lambda entry: entry[0] not in started)


class KvMirror:
    def __init__(self) -> None:
        self._number = 0
        self._cached: dict[int, None] = {}
        """An ordered set, in the order in which the blocks were stored: routers read neighbouring hashes faster."""

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def apply(self, events: Sequence[KvEvent]) -> KvEventBatch:
        """Number the events of one step as the next batch."""
        batch = [self._apply(event) for event in events]
        self._number += 1
        return KvEventBatch(number=self._number, events=batch)

    def snapshot(self) -> KvSnapshot:
        """Every cached block; the next batch has the number of the snapshot + 1."""
        return KvSnapshot(number=self._number, block_hashes=self._cached)

    def _apply(self, event: KvEvent) -> kv_event_pb2.KvEvent:
        match event:
            case BlockStored(hashes):
                self._cached.update(dict.fromkeys(hashes))
                return kv_event_pb2.KvEvent(block_stored=kv_event_pb2.BlockStored(block_hashes=hashes))
            case BlockRemoved(hashes):
                for block_hash in hashes:
                    self._cached.pop(block_hash, None)
                return kv_event_pb2.KvEvent(block_removed=kv_event_pb2.BlockRemoved(block_hashes=hashes))
            case AllBlocksCleared():
                self._cached.clear()
                return kv_event_pb2.KvEvent(all_blocks_cleared=kv_event_pb2.AllBlocksCleared())
