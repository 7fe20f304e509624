"""A request whose router may be lost: what was delivered of it, and the request that another router must get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

from kvloom.errors import KvloomError
from kvloom.objectives import delay_objectives
from kvloom.router_link.fast_path import FastPathSink
from kvloom.router_link.link import ChoiceProgress, LinkRequest, Sink
from kvloom.v1 import generation_pb2
from kvloom.v1.error_reason_pb2 import ErrorReason

_R = ErrorReason

LOSSES: Final = frozenset({_R.ERROR_REASON_ROUTER_LOST, _R.ERROR_REASON_DRAINING})
"""Errors after which another router continues the request."""
REFUSALS: Final = frozenset(
    {
        _R.ERROR_REASON_NO_SHARD_READY,
        _R.ERROR_REASON_SAFETY_UNAVAILABLE,
        _R.ERROR_REASON_QUEUE_FULL,
        _R.ERROR_REASON_DUPLICATE_REQUEST_ID,
    }
)
"""Errors with which a router rejects a partly answered request that it might accept a moment later: it has just started
and knows no shard yet, or it takes over so many requests of a dead router that its queue is full."""
REFUSAL_SECONDS: Final = 1.0
"""A rejection arrives at once. A request that fails later than this had been accepted."""
MAX_ASSIGNMENTS: Final = 64
"""How many assignments are kept of one request."""


@dataclasses.dataclass(slots=True)
class Assignment:
    """The part of a request's answer that one router's link delivers."""

    link_id: str
    first_token: int
    """How many tokens of all choices had been delivered before."""
    num_tokens: int | None = None
    """How many tokens this link delivered; None for the last assignment, which may still deliver more."""


class Owner(Protocol):
    """Finds routers for tracked requests."""

    def on_lost(self, tracked: TrackedRequest) -> None:
        """Called when no choice is running any more and at least one has not ended."""
        ...

    def on_over(self, tracked: TrackedRequest) -> None:
        """Called when all choices have ended, or the sink has raised."""
        ...

    def now(self) -> float: ...


class TrackedRequest:
    """The Sink that the routers' links call. The caller's sink gets for each choice one start, each token once, and one
    finish."""

    __slots__ = (
        "_num_ended_reasoning_tokens",
        "_num_running",
        "_num_tokens_at_submit",
        "_owner",
        "_sink",
        "_submitted_at",
        "affinity_key",
        "arrived_at",
        "assignments",
        "choices",
        "error",
        "handle",
        "is_over",
        "lost_at",
        "num_losses",
        "num_refusals",
        "request",
    )

    def __init__(self, handle: int, request: LinkRequest, sink: Sink, owner: Owner, affinity_key: bytes) -> None:
        """`request` has a seed, because every router must draw the same random numbers. A request with
        `partial_choices` counts as one that has lost its router, unless it `is_new`; this object owns their progress
        from now on."""
        self.handle = handle
        self.request = request
        self.affinity_key = affinity_key
        self.choices = [ChoiceProgress(index) for index in range(request.n)]
        self.assignments: list[Assignment] = []
        self.is_over = False
        self.arrived_at = owner.now()
        self.lost_at: float | None = None
        """When it lost the last router that had accepted it; None while its first router has it."""
        if request.partial_choices:
            if not request.is_new:
                self.lost_at = self.arrived_at
            for choice in self.choices:
                choice.is_done = True
            for choice in request.partial_choices:
                self.choices[choice.index] = choice
        self.num_losses = 0
        """How many routers were lost with it."""
        self.num_refusals = 0
        """How often it was rejected since `lost_at`."""
        self.error = generation_pb2.SequenceFinish().error
        """The last loss or rejection."""
        self._sink = sink
        self._owner = owner
        self._num_running = 0
        self._num_ended_reasoning_tokens = 0
        self._submitted_at = 0.0
        self._num_tokens_at_submit = 0

    # -- Sink -------------------------------------------------------------------------------------------------------

    def on_start(self, index: int, start: generation_pb2.SequenceStart) -> None:
        progress = self.choices[index]
        if progress.num_cached_tokens is None:
            progress.num_cached_tokens = start.num_cached_tokens
            if start.continuation_ticket:
                self.request.wanted.continuation_ticket = start.continuation_ticket
            try:
                self._sink.on_start(index, start)
            except Exception:
                self._owner.on_over(self)
                raise

    def on_tokens(
        self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[generation_pb2.TokenLogprobs]
    ) -> None:
        """The hot path."""
        progress = self.choices[index]
        progress.token_ids.extend(token_ids)
        progress.num_chars += len(delta)
        try:
            self._sink.on_tokens(index, delta, token_ids, logprobs)
        except Exception:
            self._owner.on_over(self)
            raise

    def fast_writer(self, index: int) -> Callable[[str], None] | None:
        """See FastPathSink (kvloom/router_link/fast_path.py). Not with several choices: what happens to one of them may
        depend on the others' tokens."""
        fast_writer = getattr(self._sink, "fast_writer", None) if len(self.choices) == 1 else None
        return None if fast_writer is None else fast_writer(index)

    def on_fast_path_tokens(self, index: int, token_ids: Sequence[int], num_chars: int) -> None:
        progress = self.choices[index]
        progress.token_ids.extend(token_ids)
        progress.num_chars += num_chars
        cast(FastPathSink, self._sink).on_fast_path_tokens(index, token_ids, num_chars)

    def on_finish(self, index: int, finish: generation_pb2.SequenceFinish) -> None:
        self._num_running -= 1
        if finish.reason == generation_pb2.FINISH_REASON_ERROR and self._may_continue(finish.error.reason):
            self.error = finish.error
        else:
            self._end(index, finish)
        if not self._num_running and not self.is_over:
            self._on_assignment_ended()

    # -- assignments to routers ----------------------------------------------------------------------------------------

    def next_request(self) -> LinkRequest:
        """The request for the next router. Raises KvloomError (DEADLINE_EXCEEDED)."""
        if self.lost_at is None:
            return self.request
        partial_choices = [choice for choice in self.choices if not choice.is_done]
        later = self.request.later(partial_choices)
        seconds, wanted, submit = self._owner.now() - self.arrived_at, later.wanted, later.submit
        if wanted.timeout_seconds:
            wanted.timeout_seconds -= seconds
            if wanted.timeout_seconds <= 0:
                raise KvloomError(_R.ERROR_REASON_DEADLINE_EXCEEDED, "The request took longer than its timeout.")
        if wanted.HasField("objectives"):
            delay_objectives(wanted.objectives, seconds, is_admitted=True)
        # The choices that had ended before this object was made have no tokens here.
        submit.num_ended_tokens += sum(len(choice.token_ids) for choice in self.choices if choice.is_done)
        submit.num_ended_reasoning_tokens += self._num_ended_reasoning_tokens
        return later

    def on_submitted(self, link_id: str) -> None:
        """A link has accepted the `next_request`."""
        num_tokens, num_running = 0, len(self.choices)
        if self.lost_at is not None or self.request.partial_choices:  # not the first one of most requests
            num_tokens = self._num_tokens
            num_running = sum(not choice.is_done for choice in self.choices)
        if self.assignments:
            last = self.assignments[-1]
            last.num_tokens = num_tokens - last.first_token
        self.assignments.append(Assignment(link_id, num_tokens))
        if len(self.assignments) > MAX_ASSIGNMENTS:
            del self.assignments[0]
        self._num_running = num_running
        self._submitted_at = self._owner.now()
        self._num_tokens_at_submit = num_tokens

    def fail(self, error: KvloomError) -> None:
        """Finish the choices that have not ended with `error`."""
        finish = generation_pb2.SequenceFinish(reason=generation_pb2.FINISH_REASON_ERROR, error=error.to_proto())
        for choice in self.choices:
            if not choice.is_done and not self.is_over:
                self._end(choice.index, finish)
        self._owner.on_over(self)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _may_continue(self, reason: int) -> bool:
        if reason in LOSSES:
            return True
        return self.lost_at is not None and reason in REFUSALS and not self._was_taken

    def _end(self, index: int, finish: generation_pb2.SequenceFinish) -> None:
        progress = self.choices[index]
        progress.is_done = True
        if self._num_running:  # another choice may continue at another router
            self._num_ended_reasoning_tokens += finish.num_reasoning_tokens
        if self.lost_at is not None or finish.reason == generation_pb2.FINISH_REASON_ERROR:
            finish = self._whole_finish(progress, finish)
        try:
            self._sink.on_finish(index, finish)
        except Exception:
            self._owner.on_over(self)
            raise

    def _whole_finish(
        self, progress: ChoiceProgress, finish: generation_pb2.SequenceFinish
    ) -> generation_pb2.SequenceFinish:
        """The finish with the token counts of all assignments together."""
        whole = generation_pb2.SequenceFinish()
        whole.CopyFrom(finish)
        whole.num_prompt_tokens = len(self.request.prompt_token_ids)
        whole.num_cached_tokens = progress.num_cached_tokens or 0
        whole.num_output_tokens = len(progress.token_ids)
        return whole

    def _on_assignment_ended(self) -> None:
        if all(choice.is_done for choice in self.choices):
            self._owner.on_over(self)
            return
        if self.lost_at is None or self._was_taken:
            self.lost_at = self._owner.now()
            self.num_refusals = 0
            self.num_losses += self.error.reason == _R.ERROR_REASON_ROUTER_LOST
        else:
            self.num_refusals += 1
        self._owner.on_lost(self)

    @property
    def _was_taken(self) -> bool:
        """The router of the current assignment did not reject the request."""
        return self.num_assignment_tokens > 0 or self._owner.now() - self._submitted_at > REFUSAL_SECONDS

    @property
    def num_assignment_tokens(self) -> int:
        """How many tokens the current assignment has delivered."""
        return self._num_tokens - self._num_tokens_at_submit

    @property
    def _num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)
