"""An answer while it is generated: it receives the updates of all its choices and detects its end.

`EdgeAnswer` is the Sink that a request hands to the RouterLink. Its methods run inside the link's reader, so they never
raise or block.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final

import structlog

from edge_http.answers.joined_logprobs import JoinedLogprobs
from edge_http.answers.parsed_output import CountedOutputParser
from edge_http.formatting.response_formatter import ChoiceFinish
from edge_http.formatting.usage import Usage
from kvloom.errors import KvloomError
from kvloom.v1 import generation_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason, LimitsState
from kvloom.v1.generation_pb2 import (
    CONTINUATION_EXACT,
    CONTINUATION_RESAMPLED,
    SequenceFinish,
    SequenceStart,
    TokenLogprobs,
)
from kvloom_common.process.request_context import RequestContext

if TYPE_CHECKING:  # these parts need this one
    from edge_http.answers.bill import AnswerBill
    from kvloom_common.tenancy.principal import Principal

log = structlog.get_logger()

_FINISH_REASONS: Final = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


class AnswerFeature:
    """The interface of what adds to answers and is off by default: an edge has one of each that is on, so that the way
    of a request names none of them. This one adds nothing, and each feature overrides what it needs."""

    def begin(
        self, principal: Principal | None, model: str, answer: EdgeAnswer, *, is_batch: bool, is_told: bool
    ) -> None:
        """Called before the requests of an answer are submitted. `is_told`: its client can be told how it ended."""

    def headers(self, answer: EdgeAnswer, *, has_ended: bool) -> Mapping[str, str]:  # noqa: ARG002
        """Returns headers of the response. That of a stream is sent at its start, any other one once it `has_ended`."""
        return {}

    def details(self, answer: EdgeAnswer, *, wanted: bool) -> Mapping[str, Any]:  # noqa: ARG002
        """Returns what the field `kvloom` of the answer tells; `wanted`: the client asks for such details."""
        return {}


class EdgeAnswer(abc.ABC):
    """The base of streamed and collected answers. Choices are numbered across all prompts: prompt * n + choice."""

    __slots__ = (
        "_joined",
        "_parsed",
        "_prompt_sizes",
        "bill",
        "ended",
        "error",
        "features",
        "finishes",
        "first_token_at",
        "is_direct",
        "limited_by",
        "num_choices",
        "num_open",
        "num_output_tokens",
        "request_context",
        "started_at",
        "starts",
    )

    def __init__(
        self,
        prompt_sizes: Sequence[int],
        n: int,
        parsed: Sequence[CountedOutputParser] = (),
        joined: Sequence[JoinedLogprobs] = (),
    ) -> None:
        """`parsed`: for each choice, its output taken apart; empty: all output is text. `joined`: for each choice, what
        keeps its log-probabilities to its text; empty: all tokens have text, or no log-probabilities."""
        self._prompt_sizes = prompt_sizes
        self._parsed = parsed
        self._joined = joined
        self.num_choices = len(prompt_sizes) * n
        self.num_open = self.num_choices
        """The number of choices that have not finished; cancelling affects only these."""
        self.num_output_tokens = 0
        self.limited_by = ""
        """The caller's limit that cut a choice short; "": none did."""
        self.starts: dict[int, SequenceStart] = {}
        self.finishes: dict[int, SequenceFinish] = {}
        self.started_at = time.monotonic()
        self.first_token_at: float | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: KvloomError | None = None
        """Why it ended; None while it runs and after a regular end."""
        self.request_context: RequestContext | None = None
        """The request that is answered, for log lines."""
        self.is_direct = False
        """Its requests were submitted for itself, and not for another answer that passes on to it."""
        self.bill: AnswerBill | None = None
        """None without tenants."""
        self.features: Sequence[AnswerFeature] = ()
        """The features that are on."""

    # --- Sink

    def on_start(self, index: int, start: SequenceStart) -> None:
        if self.ended.done():
            return
        self.starts[index] = start
        try:
            self._add_start(index)
        except Exception:
            self._on_bug()

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        if self.ended.done():
            return
        self.num_output_tokens += len(token_ids)
        try:
            if self._joined:
                token_ids, logprobs = self._joined[index].push(delta, token_ids, logprobs)
            self._add_tokens(index, delta, token_ids, logprobs)
        except Exception:
            self._on_bug()

    def on_finish(self, index: int, finish: SequenceFinish) -> None:
        if self.ended.done():
            return
        self.finishes[index] = finish
        self.num_open -= 1
        if finish.limited_by:
            self.limited_by = finish.limited_by
        try:
            error = self._error_of(finish, has_started=index in self.starts)
            if error is not None:
                self.fail(error)
                return
            if self._joined:
                self._add_late_logprobs(index, finish)
            self._add_finish(index, finish_of(finish))
            if not self.num_open and not self.ended.done():
                self._complete()
                self.ended.set_result(None)
        except Exception:
            self._on_bug()

    def _add_late_logprobs(self, index: int, finish: SequenceFinish) -> None:
        token_ids, entries, num_cut_bytes = self._joined[index].finish(is_cut=bool(finish.stop_string))
        if num_cut_bytes:
            self._add_cut_logprobs(index, token_ids, entries, num_cut_bytes)
        elif token_ids:
            self._add_tokens(index, "", token_ids, entries)

    # --- for the handler

    def fail(self, error: KvloomError) -> None:
        """End the answer now, with an error."""
        if not self.ended.done():
            self.error = error
            self.ended.set_result(None)

    async def wait_room(self) -> None:
        """Return when one more request may be submitted. Only embeddings have so many that they must wait."""
        return

    def usage(self) -> Usage:
        n = self.num_choices // len(self._prompt_sizes)
        first_of_prompts = [self.finishes[i] for i in range(0, self.num_choices, n)]
        return Usage(
            num_prompt_tokens=sum(self._prompt_sizes),
            num_output_tokens=sum(finish.num_output_tokens for finish in self.finishes.values()),
            num_cached_tokens=sum(finish.num_cached_tokens for finish in first_of_prompts),
            num_reasoning_tokens=self._num_reasoning_tokens() if self._parsed else None,
            num_predicted_tokens=sum(finish.num_predicted_tokens for finish in self.finishes.values()),
            num_accepted_tokens=sum(finish.num_accepted_predicted_tokens for finish in self.finishes.values()),
        )

    def _num_reasoning_tokens(self) -> int:
        """Returns what the routers have counted, as in their usage records, or else what was found in the output."""
        return sum(
            finish.num_reasoning_tokens if finish.HasField("num_reasoning_tokens") else parsed.num_reasoning_tokens
            for index, parsed in enumerate(self._parsed)
            if (finish := self.finishes.get(index)) is not None
        )

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self._prompt_sizes)

    @property
    def num_events(self) -> int:
        """The number of server-sent events; 0 for an answer that is not streamed."""
        return 0

    @property
    def first_start(self) -> SequenceStart | None:
        """The start of the choice that started first; None if no choice has started."""
        return next(iter(self.starts.values()), None)

    @property
    def limits(self) -> LimitsState | None:
        """The caller's remaining limits, as the router said first; None: it has none, or nothing is known yet."""
        for messages in (self.starts, self.finishes):
            for message in messages.values():
                if message.HasField("limits"):
                    return message.limits
        return None

    def details(self, *, wanted: bool) -> dict[str, Any] | None:
        """Returns what `x-kvloom-details` asks for (`wanted`), taken from the first choice, and what is told in any
        case: by features that are on, and the limit that cut it short. None if there is nothing."""
        found: dict[str, Any] = {}
        for feature in self.features:
            found.update(feature.details(self, wanted=wanted))
        if self.limited_by:
            found["limited_by"] = self.limited_by
        if wanted:
            if moves := self.moves:
                found["moves"] = moves
                if failover := self.failover:
                    found["failover"] = failover
            retracted = [finish.num_retracted_chars for _, finish in sorted(self.finishes.items())]
            if any(retracted):
                found["num_retracted_chars"] = retracted
            start = self.starts.get(0)
            found["shard_id"] = start.shard_id if start else ""
            found["num_cached_tokens"] = self.finishes[0].num_cached_tokens if 0 in self.finishes else 0
            found["queue_time_seconds"] = round(start.queue_time_seconds, 6) if start else 0.0
        return found or None

    @property
    def moves(self) -> dict[str, int]:
        """How often sequences had to continue on another shard, by the words for it; empty if none had to."""
        found: dict[str, int] = {}
        for finish in self.finishes.values():
            if finish.HasField("moves"):
                moves = finish.moves
                for word, count in (
                    ("preempted", moves.num_preemptions),
                    ("migrated", moves.num_migrations),
                    ("failed_over", moves.num_failovers),
                ):
                    if count:  # each finish has what had happened to its request until then
                        found[word] = max(found.get(word, 0), count)
        return found

    @property
    def failover(self) -> str:
        """How it continued on another shard: "exact", with the tokens that it would have had, or "resampled"; "" if it
        did not have to, or its router does not say."""
        told = {finish.moves.continuation for finish in self.finishes.values() if finish.HasField("moves")}
        if CONTINUATION_RESAMPLED in told:
            return "resampled"
        return "exact" if CONTINUATION_EXACT in told else ""

    @property
    def cache_uses(self) -> Set[int]:
        """The `ResultCacheUse` of its parts, which says if the result cache had them."""
        return {start.result_cache for start in self.starts.values()}

    def bill_details(self) -> dict[str, str]:
        """Returns what it costs, once it has ended, and what is left of the caller's budget; nothing without
        tenants."""
        if self.bill is None:
            return {}
        n = self.num_choices // len(self._prompt_sizes)
        return self.bill.shown(self.bill.cost_nanos(self._prompt_sizes, n, self.finishes))

    # --- for the two kinds of answer

    @property
    @abc.abstractmethod
    def _is_visible(self) -> bool:
        """The client has received a part of the answer, so it is too late for an HTTP error status."""

    @abc.abstractmethod
    def _add_start(self, index: int) -> None: ...

    @abc.abstractmethod
    def _add_tokens(
        self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> None: ...

    def _add_cut_logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_cut_bytes: int
    ) -> None:
        """Add the entries of tokens whose text was added before, as far as the last `num_cut_bytes` of the last one."""
        raise NotImplementedError

    @abc.abstractmethod
    def _add_finish(self, index: int, finish: ChoiceFinish) -> None: ...

    @abc.abstractmethod
    def _complete(self) -> None: ...

    def _note_first_token(self) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()

    def _error_of(self, finish: SequenceFinish, *, has_started: bool) -> KvloomError | None:
        """Returns the error that a finish stands for; None for a regular finish."""
        reason = finish.reason
        if reason in (generation_pb2.FINISH_REASON_STOP, generation_pb2.FINISH_REASON_LENGTH):
            return None
        if reason == generation_pb2.FINISH_REASON_CONTENT_FILTER:
            # What was refused is the prompt, which is a client error, if the answer has not started: it starts with the
            # verdict on the prompt.
            if has_started or finish.num_output_tokens or self.num_output_tokens or self._is_visible:
                return None
            message = finish.error.message or "The prompt was refused by the safety policy."
            return KvloomError(ErrorReason.ERROR_REASON_CONTENT_FILTERED, message)
        if reason == generation_pb2.FINISH_REASON_CANCELLED:
            return KvloomError(ErrorReason.ERROR_REASON_CANCELLED, "The request was cancelled.")
        if finish.error.reason == ErrorReason.ERROR_REASON_UNSPECIFIED:
            return KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The request failed.")
        return KvloomError.from_proto(finish.error)

    def _on_bug(self) -> None:
        # The link's reader calls this, which works for no particular request.
        log.exception("answer_broke", **(self.request_context.log_fields() if self.request_context else {}))
        self.fail(KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The answer could not be delivered."))


def finish_of(finish: SequenceFinish) -> ChoiceFinish:
    """Convert a regular finish."""
    if finish.reason == generation_pb2.FINISH_REASON_CONTENT_FILTER:
        return ChoiceFinish("content_filter", refusal=finish.error.message)
    return ChoiceFinish(_FINISH_REASONS[finish.reason], finish.stop_string)


class PromptSink:
    """Maps the choices of one prompt to their numbers among the choices of all prompts."""

    __slots__ = ("_answer", "_base")

    def __init__(self, answer: EdgeAnswer, base: int) -> None:
        self._answer = answer
        self._base = base

    def on_start(self, index: int, start: SequenceStart) -> None:
        self._answer.on_start(self._base + index, start)

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        self._answer.on_tokens(self._base + index, delta, token_ids, logprobs)

    def on_finish(self, index: int, finish: SequenceFinish) -> None:
        self._answer.on_finish(self._base + index, finish)
