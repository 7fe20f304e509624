"""A shard: streams to its routers, and an engine that runs in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FinishReason
from lab.dst import script
from lab.dst.environment import Environment
from lab.dst.nodes.block_cache import BlockCache
from lab.dst.nodes.engine import SimulatedEngine, SimulatedSequence
from lab.dst.nodes.shard_stream import ShardStream
from lab.dst.scenario import ShardShape
from router.core.actions import CancelOnShard, SubmitAttempt, WantKvSnapshot
from router.core.dispatch.attempt_sender import PROBE_CLIENT_ID, PROBE_TOKEN_IDS
from router.core.dispatch.prefill_chunks import PREFILL_CHUNK_CLIENT_ID
from router.core.events import (
    AdaptersReported,
    ChoiceSpec,
    KvChange,
    KvSnapshotArrived,
    Request,
    ShardAdapter,
    ShardDescription,
    ShardLoad,
    ShardUp,
)
from router.core.fleet.fleet import SEEDED_RESUME
from router.core.frames import Finish

ROUTER_CLIENT_IDS: Final = (PROBE_CLIENT_ID, PREFILL_CHUNK_CLIENT_ID)
"""Client ids of requests that routers send on their own behalf."""


class SimulatedShard:
    def __init__(self, env: Environment, shard_id: str, shape: ShardShape, incarnation: int = 0) -> None:
        """`incarnation` is that of the last process which had this id."""
        self._env = env
        self.shard_id = shard_id
        self.shape = shape
        self.streams: list[ShardStream] = []
        self.is_up = False
        self.is_hung = False
        self.has_hung_engine = False
        self.is_draining = False
        self.is_withdrawn = False
        """True when its model is about to be unloaded."""
        self.is_ending = False
        """True when it has been told to stop, for ever."""
        self.hands_over = False
        self.ends_at: float | None = None
        """When it has to be empty, as it has had notice."""
        self.slowness = 1.0
        self.incarnation = incarnation
        self._failure_share = 0.0
        self.num_submitted = 0
        """The sequences that this incarnation has accepted."""
        self.adapters: dict[str, str] = {}
        """The checksums of its adapters by name, which a restart keeps."""
        self._loaded_adapter = ""
        """The name of the one that is loaded: there is room for one."""
        self.cache = BlockCache(shape)
        self.engine = SimulatedEngine(env, shape, self.cache, self._note_stored, self._note_handoff)
        self._kv_number = 0
        self._step_is_due = False
        self.on_start: Callable[[], None] = lambda: None
        """Called by every new incarnation, which announces itself."""

    # -- process ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.incarnation += 1
        self.is_up, self.is_hung, self.is_draining, self.hands_over = True, False, False, False
        self.is_withdrawn = False
        self.ends_at = None
        self.has_hung_engine = False
        self.slowness = 1.0
        self._loaded_adapter = ""
        self.cache = BlockCache(self.shape)
        self.engine = SimulatedEngine(self._env, self.shape, self.cache, self._note_stored, self._note_handoff)
        if self._failure_share:
            self.break_engine(self._failure_share)
        self.num_submitted = 0
        self._kv_number = 0
        self._step_is_due = False
        self.on_start()

    def crash(self, router_notices_after: float) -> None:
        """The process dies. Whether the routers notice at once depends on whether its kernel is still up."""
        self.is_up = False
        for stream in self.streams:
            stream.break_off(router_notices_after, 0.0)
        self.streams = []
        self.engine.sequences.clear()

    def bring_up(self) -> None:
        if not self.is_up and not self.is_ending:
            self.start()

    def restore_speed(self) -> None:
        self.slowness = 1.0

    def hang(self) -> None:
        """The process stays connected but reads, computes and writes nothing."""
        if self.is_up and not self.is_hung:
            self.is_hung = True
            for stream in self.streams:
                stream.to_shard.stall()

    def wake_up(self) -> None:
        if self.is_hung:
            self.is_hung = False
            for stream in self.streams:
                stream.to_shard.heal()
            self._step_is_due = False
            self._schedule_step()

    def hang_engine(self) -> None:
        """The engine computes nothing, but the process reads frames, answers cancels and reports its load."""
        if self.is_up:
            self.has_hung_engine = True

    def wake_engine(self) -> None:
        self.has_hung_engine = False

    def break_engine(self, failure_share: float) -> None:
        """From now on, after restarts too, so many of its sequences fail."""
        self._failure_share = failure_share
        self.engine.failure_share = failure_share

    @property
    def is_stuck(self) -> bool:
        """True when it produces no tokens."""
        return self.is_hung or self.has_hung_engine

    def set_draining(self, draining: bool) -> None:
        """Routers are notified at once."""
        self.is_draining = draining
        self.hands_over = False
        self.ends_at = None
        self.send_load()

    def set_withdrawn(self, withdrawn: bool) -> None:
        """Routers are notified at once."""
        self.is_withdrawn = withdrawn
        self.send_load()

    def change_adapter(self, name: str, checksum: str | None) -> None:
        """It has this adapter from now on, or (None) no longer. Routers are notified at once; what runs ends."""
        if self.is_hung:
            return
        if checksum is None:
            self.adapters.pop(name, None)
        else:
            self.adapters[name] = checksum
        if self._loaded_adapter == name:
            self._loaded_adapter = ""
        self._send_adapters()

    def _send_adapters(self) -> None:
        for stream in self.streams:
            stream.send_frame(self._adapter_report())

    def _adapter_report(self) -> AdaptersReported:
        states = [ShardAdapter(name, self.adapters[name], name == self._loaded_adapter) for name in self.adapters]
        return AdaptersReported(self.shard_id, states, 2 * self._env.scenario.step_seconds)

    def begin_to_end(self) -> None:
        """The model has been withdrawn, and the process is told to stop: it drains."""
        self.is_ending = True
        self.is_hung = False
        if self.is_up:
            self.set_draining(True)

    def hand_over(self) -> None:
        """The drain deadline has passed: ask the routers to move the remaining sequences."""
        self.hands_over = True
        self.send_load()

    def take_notice(self, seconds: float) -> None:
        """It has to be empty within that time. Routers are notified at once."""
        self.is_draining, self.hands_over, self.ends_at = True, False, self._env.timeline.now + seconds
        self.send_load()

    def leave(self) -> None:
        """The time of its notice is over: it returns what is left, and its process ends."""
        error = KvloomError(ErrorReason.ERROR_REASON_DRAINING, "the shard has stopped")
        for stream, slot in list(self.engine.sequences):
            stream.parts.finishes.append(Finish(slot, FinishReason.FINISH_REASON_ERROR, error=error))
        self.engine.sequences.clear()
        for stream in self.streams:
            stream.send_frame()
        self.crash(0.05)

    def send_load(self) -> None:
        for stream in self.streams:
            stream.send_frame(*stream.load_report(self._load(stream)))

    def _load(self, stream: ShardStream) -> ShardLoad:
        load = self.engine.load(stream, draining=self.is_draining)
        if self.hands_over or self.is_withdrawn or self.ends_at is not None:
            return msgspec.structs.replace(
                load,
                hand_over=self.hands_over,
                withdrawn=self.is_withdrawn,
                empty_within_seconds=None if self.ends_at is None else max(0.0, self.ends_at - self._env.timeline.now),
            )
        return load

    def clear_cache(self) -> None:
        """The engine forgets its blocks."""
        self.cache.clear()
        self._send_kv([KvChange(cleared=True)])

    def _note_stored(self, request: Request, changes: list[KvChange]) -> None:
        self._env.checks.on_stored(self, request, changes)

    def _note_handoff(self, sequence: SimulatedSequence) -> None:
        """The KV can be fetched as long as this process lives, and does not hang."""
        incarnation = self.incarnation

        def can_fetch() -> bool:
            return self.is_up and not self.is_stuck and self.incarnation == incarnation

        self._env.handoffs[sequence.handoff] = can_fetch
        self._env.checks.on_handoff(self, sequence.request, sequence.handoff)

    def _can_fetch(self, attempt: SubmitAttempt) -> bool:
        self._env.checks.on_fetch(self, attempt)
        can_fetch = self._env.handoffs.pop(attempt.handoff, None)
        return can_fetch is not None and can_fetch()

    def touch_cache(self, block_hash: int) -> None:
        """Store an unrelated block. Its event reveals whether an earlier one was lost."""
        self._send_kv(self.cache.store([block_hash]))

    # -- streams ------------------------------------------------------------------------------------------------------

    def accept(self, stream: ShardStream) -> None:
        """A router has connected. It gets a hello and a snapshot of the cache."""
        if not self.is_up or self.is_hung or not stream.is_open_at_router or not stream.node.is_alive:
            stream.break_off(0.01, 0.0)
            return
        self.streams.append(stream)
        shape = self.shape
        description = ShardDescription(
            self.shard_id,
            f"{self.shard_id}-{self.incarnation}",
            shape.model,
            shape.block_size,
            shape.num_blocks,
            shape.max_batch,
            shape.max_model_len,
            capabilities=frozenset({SEEDED_RESUME}),
            variant=shape.variant,
            engine="sim",
            role=shape.role,
        )
        snapshot = KvSnapshotArrived(self.shard_id, self._kv_number, list(self.cache.blocks))
        adapters = [self._adapter_report()] if self.adapters else []
        stream.send_frame(ShardUp(description), snapshot, *adapters, *stream.load_report(self._load(stream)))

    def lose(self, stream: ShardStream) -> None:
        """The stream broke. Its sequences are cancelled silently."""
        if stream in self.streams:
            self.streams.remove(stream)
            stream.to_shard.cut()
            stream.to_router.cut()
            for key in [key for key in self.engine.sequences if key[0] is stream]:
                del self.engine.sequences[key]

    def receive(self, stream: ShardStream, message: object) -> None:
        if stream not in self.streams:
            return
        match message:
            case SubmitAttempt():
                self._submit(stream, message)
            case CancelOnShard():
                for slot in message.slots:
                    if self.engine.sequences.pop((stream, slot), None) is not None:
                        stream.parts.finishes.append(Finish(slot, FinishReason.FINISH_REASON_CANCELLED))
            case WantKvSnapshot():
                stream.send_frame(KvSnapshotArrived(self.shard_id, self._kv_number, list(self.cache.blocks)))
            case _:
                raise AssertionError(message)
        if stream.parts and self._env.rng.random() < 0.5:
            stream.send_frame()
        self._schedule_step()

    def _submit(self, stream: ShardStream, attempt: SubmitAttempt) -> None:
        for spec in attempt.choices:
            if attempt.request.client_id not in ROUTER_CLIENT_IDS:
                self._env.checks.on_submit(self, stream, attempt, spec)
            adapter = attempt.request.adapter
            if adapter is not None and self.adapters.get(adapter.name) != adapter.checksum:
                self._refuse(stream, spec, ErrorReason.ERROR_REASON_ADAPTER_NOT_FOUND)
            elif self.is_draining:
                self._refuse(stream, spec, ErrorReason.ERROR_REASON_DRAINING, attempt.handoff)
            elif len(self.engine.sequences) >= self.shape.max_sequences:
                self._refuse(stream, spec, ErrorReason.ERROR_REASON_QUEUE_FULL, attempt.handoff)
            elif attempt.handoff and not self._can_fetch(attempt):
                self._refuse(stream, spec, ErrorReason.ERROR_REASON_ENGINE_FAILED)
            else:
                self._add_sequence(stream, attempt, spec)

    def _refuse(
        self, stream: ShardStream, spec: ChoiceSpec, reason: ErrorReason.ValueType, unused_handoff: bytes = b""
    ) -> None:
        error = KvloomError(reason, "refused by the shard")
        finish = Finish(spec.slot, FinishReason.FINISH_REASON_ERROR, error=error, handoff=unused_handoff)
        stream.parts.finishes.append(finish)

    def _add_sequence(self, stream: ShardStream, attempt: SubmitAttempt, spec: ChoiceSpec) -> None:
        request = attempt.request
        self.num_submitted += 1
        if request.adapter is not None and request.adapter.name != self._loaded_adapter:
            self._loaded_adapter = request.adapter.name
            self._send_adapters()
        handoff = b""
        if request.client_id in ROUTER_CLIENT_IDS and not attempt.prefill_only:
            tokens = PROBE_TOKEN_IDS
        else:
            assert isinstance(request.sampling, script.ScriptedSampling)
            whole = script.answer(request.sampling.script_key, spec.index)
            tokens = whole[: attempt.max_tokens]
            if attempt.prefill_only and len(whole) > 1:
                handoff = f"{self.shard_id}-{self.incarnation}/{self.num_submitted}".encode()
        sequence = SimulatedSequence(
            request,
            tokens,
            attempt.max_tokens,
            position=len(spec.output_token_ids),
            num_chars=spec.num_delivered_chars,
            handoff=handoff,
        )
        if sequence.position >= len(tokens):
            # The sequence had already ended: only its remaining text and its finish are sent.
            self.engine.end(stream, spec.slot, sequence)
        else:
            self.engine.sequences[stream, spec.slot] = sequence

    # -- steps --------------------------------------------------------------------------------------------------------

    def _schedule_step(self) -> None:
        has_work = self.engine.sequences or any(stream.parts for stream in self.streams)
        if has_work and not self._step_is_due and not self.is_hung:
            self._step_is_due = True
            seconds = self._env.scenario.step_seconds * self.slowness * (0.5 + self._env.rng.random())
            self._env.timeline.after(seconds, self._step, self.incarnation)

    def _step(self, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.is_up or self.is_hung or not self._step_is_due:
            return
        self._step_is_due = False
        changes = [] if self.has_hung_engine else self.engine.step()
        self._send_kv(changes)
        self._schedule_step()

    def _send_kv(self, changes: list[KvChange]) -> None:
        """Send KV events, perhaps the load, and the pending step to every router."""
        self._kv_number += bool(changes)
        sends_load = self._env.is_calm or self._env.rng.random() < 0.4
        for stream in self.streams:
            kv = stream.kv_events(self._kv_number, changes) if changes else []
            load = stream.load_report(self._load(stream)) if sends_load else []
            stream.send_frame(*kv, *load)
