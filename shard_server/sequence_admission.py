"""Admits what routers submit: each choice becomes a sequence of the engine, or is rejected in the router's next frame.

The errors with which a shard rejects or ends a sequence are worded here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from kvloom.errors import KvloomError, invalid_argument, protocol_violation
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, Choice, SequenceFinish
from kvloom.v1.shard_service_pb2 import ShardSubmit
from kvloom_common.process.request_context import request_fields
from kvloom_common.text.detokenizer import TokenText, stopping_detokenizer
from shard_server.connection import RouterConnection
from shard_server.engines.base import Engine, EngineError, EngineRequest, RequestRefusedError
from shard_server.live_sequences import LiveSequence, LiveSequences, visible_output
from shard_server.load_reporter import LoadReporter
from shard_server.served_adapters import ServedAdapters
from shard_server.submits import resolve_submit

log = structlog.get_logger()

_TRY_ELSEWHERE: Final = frozenset({ErrorReason.ERROR_REASON_DRAINING, ErrorReason.ERROR_REASON_QUEUE_FULL})
"""Reasons that say nothing of the request."""


class SequenceAdmission:
    """The intake of one engine, for all routers. `max_sequences` limits the sequences in the engine, including those
    that are being cancelled there."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenText,
        live: LiveSequences,
        load: LoadReporter,
        max_sequences: int,
        clock: Callable[[], float],
        adapters: ServedAdapters,
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._engine_info = engine.info
        self._tokenizer = tokenizer
        self._live = live
        self._load = load
        self._max_sequences = max_sequences
        self._clock = clock
        self._serials = itertools.count()
        self.engine_has_failed = False

    def use(self, engine: Engine) -> None:
        """Another engine takes the place of one that was closed."""
        self._engine, self._engine_info = engine, engine.info

    def submit(self, connection: RouterConnection, submit: ShardSubmit) -> None:
        """Raises KvloomError (PROTOCOL_VIOLATION). Every other error rejects the choice in the router's next frame."""
        choices = submit.choices
        slots = {choice.slot for choice in choices}
        if not choices or len(slots) < len(choices) or not slots.isdisjoint(connection.by_slot):
            raise protocol_violation(f"Request {submit.request_id}: every choice needs a slot that is not in use.")
        try:
            self._check_capacity(len(choices))
            if submit.HasField("adapter"):
                self._adapters.check(submit)
            requests = resolve_submit(submit, self._engine_info, next(self._serials), connection.origin)
        except KvloomError as error:
            # The KV has not been asked for, and another shard may have room.
            unused = submit.handoff if error.reason in _TRY_ELSEWHERE else b""
            for choice in choices:
                connection.parts.finishes.append(rejection(choice.slot, error, unused))
            return
        now = self._clock()
        names = request_fields(submit.request_id, submit.client_request_id, submit.traceparent, submit.tenant)
        for choice, request in zip(choices, requests, strict=True):
            try:
                self._submit_choice(connection, choice, request, submit, now, names)
            except KvloomError as error:
                connection.parts.finishes.append(rejection(choice.slot, error))

    def _check_capacity(self, num_choices: int) -> None:
        if self.engine_has_failed:
            raise engine_failed()
        if self._load.draining:
            raise draining()
        if self._live.num_in_engine + num_choices > self._max_sequences:
            raise queue_full(len(self._live.by_request_id))

    def _submit_choice(
        self,
        connection: RouterConnection,
        choice: Choice,
        request: EngineRequest,
        submit: ShardSubmit,
        now: float,
        names: Mapping[str, str],
    ) -> None:
        stop_strings, shown = submit.stop.stop, submit.sampling.shown_special_token_ids
        output = visible_output(request), choice.num_delivered_chars
        detokenizer = stopping_detokenizer(self._tokenizer, submit.stop, *output, shown)
        sequence = LiveSequence(connection, choice.slot, request, detokenizer, bool(stop_strings), now, names)
        reason = sequence.already_ended()
        if reason is None:
            try:
                self._engine.submit(request)
            except RequestRefusedError as error:
                raise invalid_argument(f"This shard's engine cannot run the request: {error}.") from error
            except EngineError as error:
                log.warning("sequence_refused", sequence_id=request.request_id, error=str(error), **names)
                raise engine_failed() from error  # every mistake that a client can make was checked before
            self._load.on_submit(request)
        self._live.add(sequence)
        if reason is not None:
            self._live.flush(sequence)
            self._live.finish(sequence, reason)


def rejection(slot: int, error: KvloomError, unused_handoff: bytes = b"") -> SequenceFinish:
    """The finish of a sequence that was never started."""
    return SequenceFinish(slot=slot, reason=FINISH_REASON_ERROR, error=error.to_proto(), handoff=unused_handoff)


def engine_failed() -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_ENGINE_FAILED, "The engine failed while it served this request.")


def draining() -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_DRAINING, "This shard takes no new requests: it is draining.")


def stopping() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_DRAINING, "The shard that served this request has stopped.", retry_after_seconds=1.0
    )


def queue_full(num_sequences: int) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_QUEUE_FULL,
        f"This shard has {num_sequences} sequences running or waiting and takes no more.",
        retry_after_seconds=1.0,
    )
