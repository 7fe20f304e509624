"""Takes what routers submit: each choice becomes a sequence of the engine's, or is refused in its next frame."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import structlog

from kvloom.errors import KvloomError, invalid_argument, protocol_violation
from kvloom.text.detokenizer import IncrementalDetokenizer, TokenText
from kvloom.v1.generation_pb2 import Choice
from kvloom.v1.shard_service_pb2 import ShardSubmit
from shard_server.connection import RouterConnection
from shard_server.engines.base import Engine, EngineError, EngineRequest, RequestRefusedError
from shard_server.live_sequences import LiveSequences
from shard_server.load_reporter import LoadReporter
from shard_server.refusals import draining, engine_failed, queue_full, refusal
from shard_server.sequences import LiveSequence, shown_output
from shard_server.submits import resolve_submit

log = structlog.get_logger()


class Intake:
    """Of one engine, for all routers. `max_sequences`: those that the engine has at most, also those it is to drop."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TokenText,
        live: LiveSequences,
        load: LoadReporter,
        max_sequences: int,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._engine_info = engine.info
        self._tokenizer = tokenizer
        self._live = live
        self._load = load
        self._max_sequences = max_sequences
        self._clock = clock
        self._serials = itertools.count()
        self.engine_has_failed = False

    def submit(self, connection: RouterConnection, submit: ShardSubmit) -> None:
        """Raises KvloomError (PROTOCOL_VIOLATION); every other error is a refusal."""
        choices = submit.choices
        slots = {choice.slot for choice in choices}
        if not choices or len(slots) < len(choices) or not slots.isdisjoint(connection.by_slot):
            raise protocol_violation(f"Request {submit.request_id}: every choice needs a slot that is not in use.")
        try:
            self._check_capacity(len(choices))
            requests = resolve_submit(submit, self._engine_info, next(self._serials), connection.origin)
        except KvloomError as error:
            for choice in choices:
                connection.parts.finishes.append(refusal(choice.slot, error))
            return
        now = self._clock()
        for choice, request in zip(choices, requests, strict=True):
            try:
                self._submit_choice(connection, choice, request, submit.stop.stop, now)
            except KvloomError as error:
                connection.parts.finishes.append(refusal(choice.slot, error))

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
        stop_strings: Sequence[str],
        now: float,
    ) -> None:
        detokenizer = IncrementalDetokenizer(
            self._tokenizer, stop_strings, shown_output(request), choice.num_delivered_chars
        )
        sequence = LiveSequence(connection, choice.slot, request, detokenizer, bool(stop_strings), now)
        reason = sequence.already_ended()
        if reason is None:
            try:
                self._engine.submit(request)
            except RequestRefusedError as error:
                raise invalid_argument(f"This shard's engine cannot run the request: {error}.") from error
            except EngineError as error:
                log.warning("the engine refused a sequence", request_id=request.request_id, error=str(error))
                raise engine_failed() from error  # what a client can do wrong has been checked before
            self._load.on_submit(request)
        self._live.add(sequence)
        if reason is not None:
            self._live.flush(sequence)
            self._live.finish(sequence, reason)
