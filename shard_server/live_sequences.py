"""The sequences of a shard's engine that have not finished, and what can happen to one: it is started, flushed,
cancelled and finished.

A sequence leaves this record as soon as its finish is in a frame. Later output of the engine for it is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import structlog

from kvloom.errors import KvloomError
from kvloom.v1 import generation_pb2
from kvloom.v1.generation_pb2 import FINISH_REASON_STOP, FinishReason, SequenceFinish
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from kvloom_common.process.access_log import NO_ACCESS_LOG, AccessLog
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from shard_server.engines.base import Engine, EngineRequest, SequenceStart, TokenLogprobs
from shard_server.metrics import ShardMetrics
from shard_server.step_frames import StepParts

log = structlog.get_logger()

_NO_NAMES: Final[Mapping[str, str]] = {}


class SequenceOwner(Protocol):
    """Holds what a sequence needs of the router connection that submitted it."""

    by_slot: dict[int, LiveSequence]
    parts: StepParts
    """The frame that is being filled for the router."""


class LiveSequence:
    """One submitted choice that has not finished: where its output goes, its text, and what it has delivered."""

    __slots__ = (
        "connection",
        "detokenizer",
        "has_stop_strings",
        "names",
        "num_cached_tokens",
        "num_output_tokens",
        "predicted",
        "received_at",
        "request",
        "slot",
    )

    def __init__(
        self,
        connection: SequenceOwner,
        slot: int,
        request: EngineRequest,
        detokenizer: IncrementalDetokenizer,
        has_stop_strings: bool,
        received_at: float,
        names: Mapping[str, str] = _NO_NAMES,
    ) -> None:
        """`names` are those of the request in log lines."""
        self.names = names
        self.connection = connection
        self.slot = slot
        self.request = request
        self.detokenizer = detokenizer
        self.has_stop_strings = has_stop_strings
        self.num_cached_tokens = 0
        self.num_output_tokens = len(request.output_token_ids)
        """Includes the output tokens of earlier attempts."""
        self.predicted: tuple[int, int] = (0, 0)
        """How many predicted tokens were drafted, and how many of them were right."""
        self.received_at = received_at

    def already_ended(self) -> FinishReason.ValueType | None:
        """The finish reason, if an earlier attempt generated the sequence's last token but did not report the end."""
        if self.request.pooling is not None:
            return None  # it ends with its vector
        tokens = self.request.output_token_ids
        if self.detokenizer.stop_string is not None or (tokens and tokens[-1] in self.request.stop_token_ids):
            return FinishReason.FINISH_REASON_STOP
        if len(tokens) >= self.request.max_tokens:
            return FinishReason.FINISH_REASON_LENGTH
        return None

    def push_until_stop(self, token_ids: Sequence[int]) -> tuple[Sequence[int], str]:
        """Detokenize several tokens, or the last ones; returns the tokens to deliver and their text.

        A stop token has no text. Nothing is delivered after the token that completes a stop string.
        """
        text = ""
        for i, token_id in enumerate(token_ids):
            if token_id not in self.request.stop_token_ids:
                text += self.detokenizer.push((token_id,))
            if self.detokenizer.stop_string is not None:
                return token_ids[: i + 1], text
        return token_ids, text

    def finish(self, reason: FinishReason.ValueType) -> SequenceFinish:
        """The finish message of the sequence, with exact token counts."""
        stop_string = self.detokenizer.stop_string if reason == FINISH_REASON_STOP else None
        return SequenceFinish(
            slot=self.slot,
            reason=reason,  # pyrefly: ignore[bad-argument-type]  (the stubs take the enum's type, ints are fine)
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            stop_string=stop_string or "",
            num_predicted_tokens=self.predicted[0],
            num_accepted_predicted_tokens=self.predicted[1],
        )


class CancellingSequences:
    """Sequences that have finished for their router but have not yet ended in the engine, by the engine's request id.

    Counts the tokens that the engine generates for a sequence after its client has stopped wanting them.
    """

    def __init__(self, metrics: ShardMetrics) -> None:
        self._metrics = metrics
        self._num_wasted: dict[str, int | None] = {}
        self._names: dict[str, Mapping[str, str]] = {}
        """The names of the requests of unwanted sequences, for log lines."""

    def __len__(self) -> int:
        return len(self._num_wasted)

    def add(self, request_id: str) -> None:
        """The answer is complete, but the engine has not stopped yet. Its further tokens are not counted as wasted."""
        self._num_wasted[request_id] = None

    def add_unwanted(self, request_id: str, num_late_tokens: int, names: Mapping[str, str]) -> None:
        """The client no longer wants the answer, and did not want its last `num_late_tokens` tokens. `names` are those
        of the request in log lines."""
        self._num_wasted[request_id] = num_late_tokens
        self._names[request_id] = names

    def note_tokens(self, request_id: str, count: int) -> None:
        """The engine has generated `count` more tokens."""
        num_wasted = self._num_wasted.get(request_id)
        if num_wasted is not None:
            self._num_wasted[request_id] = num_wasted + count

    def end(self, request_id: str) -> None:
        """The engine has ended a sequence; it need not be one of these."""
        num_wasted = self._num_wasted.pop(request_id, None)
        if num_wasted is not None:
            self._metrics.on_unwanted_end(num_wasted)
            names = self._names.pop(request_id, _NO_NAMES)
            log.info("cancelled_sequence_ended", sequence_id=request_id, num_wasted_tokens=num_wasted, **names)

    def end_all(self) -> None:
        for request_id in list(self._num_wasted):
            self.end(request_id)


class SequenceObserver(Protocol):
    """Is told of the sequences of a shard, for traces."""

    def sequence_started(self, sequence: LiveSequence, start: SequenceStart, now: float) -> None: ...

    def sequence_ended(self, sequence: LiveSequence, finish: SequenceFinish, now: float) -> None: ...


class LiveSequences:
    """The live sequences of one engine, from all routers."""

    def __init__(
        self,
        engine: Engine,
        metrics: ShardMetrics,
        clock: Callable[[], float],
        access_log: AccessLog = NO_ACCESS_LOG,
        tracer: SequenceObserver | None = None,
    ) -> None:
        self._engine = engine
        self._tracer = tracer
        self._access_log = access_log
        self._metrics = metrics
        self._clock = clock
        self.by_request_id: dict[str, LiveSequence] = {}
        """Keyed by the engine's request ids."""
        self.cancelling = CancellingSequences(metrics)
        self._idle = asyncio.Event()
        self._idle.set()

    def use(self, engine: Engine) -> None:
        """Another engine takes the place of one that was closed. No sequence may be live; those that were being
        cancelled have ended with the old one."""
        self._engine = engine
        self.cancelling.end_all()

    @property
    def num_in_engine(self) -> int:
        """Includes sequences that have finished but have not yet ended in the engine."""
        return len(self.by_request_id) + len(self.cancelling)

    async def wait_idle(self) -> None:
        """Returns when no sequence is live."""
        await self._idle.wait()

    def add(self, sequence: LiveSequence) -> None:
        self.by_request_id[sequence.request.request_id] = sequence
        sequence.connection.by_slot[sequence.slot] = sequence
        self._idle.clear()

    def start(self, sequence: LiveSequence, start: SequenceStart, now: float) -> None:
        """The engine has produced the first token of `sequence`."""
        sequence.num_cached_tokens = num_cached_tokens = start.num_cached_tokens
        queue_time_seconds = start.queue_time_seconds
        sequence.connection.parts.starts.append(
            generation_pb2.SequenceStart(
                slot=sequence.slot,
                num_cached_tokens=num_cached_tokens,
                queue_time_seconds=queue_time_seconds,
                prompt_logprobs=logprobs_to_proto(0, start.prompt_logprobs) if start.prompt_logprobs else None,
            )
        )
        self._metrics.on_start(
            len(sequence.request.prompt_token_ids), num_cached_tokens, queue_time_seconds, now - sequence.received_at
        )
        if self._tracer is not None:
            self._tracer.sequence_started(sequence, start, now)

    def flush(self, sequence: LiveSequence) -> None:
        """Add the text that the detokenizer still holds, as an entry without tokens."""
        text = sequence.detokenizer.flush()
        if text:
            parts = sequence.connection.parts
            parts.slots.append(sequence.slot)
            parts.num_tokens.append(0)
            parts.uneven = True
            parts.deltas.append(text)

    def cancel_in_engine(self, sequence: LiveSequence) -> None:
        """Stop the engine's work on a complete answer. The caller also finishes the sequence."""
        self.cancelling.add(sequence.request.request_id)
        self._engine.cancel(sequence.request.request_id)

    def cancel_unwanted(self, sequence: LiveSequence, num_arrived_tokens: int) -> None:
        """Cancel and finish a sequence of which the client wants only the first `num_arrived_tokens` tokens."""
        self.cancel_in_engine(sequence)
        num_late_tokens = max(0, sequence.num_output_tokens - num_arrived_tokens)
        self.cancelling.add_unwanted(sequence.request.request_id, num_late_tokens, sequence.names)
        self.finish(sequence, generation_pb2.FINISH_REASON_CANCELLED)

    def finish(
        self,
        sequence: LiveSequence,
        reason: FinishReason.ValueType,
        error: KvloomError | None = None,
        embedding: bytes = b"",
        handoff: bytes = b"",
    ) -> None:
        """End a sequence; its finish goes into its router's next frame."""
        del self.by_request_id[sequence.request.request_id]
        connection = sequence.connection
        del connection.by_slot[sequence.slot]
        finish = sequence.finish(reason)
        if error is not None:
            finish.error.CopyFrom(error.to_proto())
        if embedding:
            finish.embedding = embedding
        if handoff:
            finish.handoff = handoff
        connection.parts.finishes.append(finish)
        now = self._clock()
        duration_seconds = now - sequence.received_at
        self._metrics.on_finish(reason, duration_seconds)
        if self._tracer is not None:
            self._tracer.sequence_ended(sequence, finish, now)
        if self._access_log.is_on:
            self._log_end(sequence, finish, duration_seconds)
        if not self.by_request_id:
            self._idle.set()

    def _log_end(self, sequence: LiveSequence, finish: SequenceFinish, duration_seconds: float) -> None:
        names = sequence.names
        if not self._access_log.wants(names.get("client_request_id") or names.get("request_id", "")):
            return
        log.info(
            "sequence_ended",
            **names,
            sequence_id=sequence.request.request_id,
            outcome=FINISH_REASON_NAMES[finish.reason],
            num_prompt_tokens=finish.num_prompt_tokens,
            num_cached_tokens=finish.num_cached_tokens,
            num_output_tokens=finish.num_output_tokens,
            duration_seconds=round(duration_seconds, 6),
        )


def visible_output(request: EngineRequest) -> Sequence[int]:
    """The output of earlier attempts, without a final stop token, which has no text."""
    tokens = request.output_token_ids
    return tokens[:-1] if tokens and tokens[-1] in request.stop_token_ids else tokens


def logprobs_to_proto(slot: int, logprobs: Sequence[TokenLogprobs]) -> list[generation_pb2.TokenLogprobs]:
    return [
        generation_pb2.TokenLogprobs(
            slot=slot,
            logprob=entry.logprob,
            top_token_ids=[token_id for token_id, _ in entry.top],
            top_logprobs=[logprob for _, logprob in entry.top],
        )
        for entry in logprobs
    ]
