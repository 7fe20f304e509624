"""`Generate` whose reader sees no break. When its connection is lost, `Resume` goes on where it was, if the answer is
resumable; when its router is lost, or it is not, another router (or the same, when it is back) is asked to go on behind
what has come."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

import grpc

from kvloom.client.generation import Delta
from kvloom.client.migrating_generation import MigratingGeneration
from kvloom.client.router_channels import ASK_ELSEWHERE, RouterChannels
from kvloom.client.router_routes import RouterRoutes
from kvloom.errors import KvloomError
from kvloom.router_link.cancel_notifier import CancelNotifier
from kvloom.router_link.tracked_request import REFUSALS
from kvloom.transport.grpc_errors import from_rpc_error, told_error
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import GenerateRequest, ResumeRequest

CARRIED_KEY: Final = "kvloom-goes-on"
"""In the initial metadata of a Generate: the router knows of `partial_choices`. One that does not would begin anew."""
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0
GIVE_UP_SECONDS: Final = 30.0
"""Of a resumable answer, without a response after a break: the router's own grace period is over by then, as a rule."""
BREAKS_PER_ROUTER: Final = 3
"""Before another router is asked."""
OPEN_TIMEOUT_SECONDS: Final = 4.0
"""For a router to say that it has the call: one that hangs says nothing."""
MAX_LOSSES: Final = 5
"""Routers that may be lost with an answer; it may be what breaks them."""

# What gRPC itself says when a connection breaks or cannot be made.
_BREAKS: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)
_R = ErrorReason
_LOST_HERE: Final = frozenset({_R.ERROR_REASON_NOT_FOUND, _R.ERROR_REASON_EVENTS_GONE})
"""What Resume says of an answer that this router cannot go on with."""
_NOT_YET: Final = REFUSALS | ASK_ELSEWHERE | {_R.ERROR_REASON_MODEL_NOT_FOUND}
"""What a router says to an answer that comes from a lost one and that it, or another one, might take a moment later."""


async def carried_deltas(
    routers: RouterChannels, request: GenerateRequest, reattach_seconds: float, lost: CancelNotifier
) -> AsyncGenerator[Delta, None]:
    """The news of `request`, which has a request_id, each once and in order. `reattach_seconds`: how long a router is
    looked for that goes on with it; 0: none is. Raises KvloomError: the answer's own, or ROUTER_LOST when nobody goes
    on with it. Closing the generator early cancels the request."""
    answer = MigratingGeneration(request)
    ways = RouterRoutes(routers, lost)
    course = _Course(answer, ways, reattach_seconds)
    is_open = True
    try:
        while not answer.is_complete:
            call = course.next_call()
            try:
                await course.opened(call)
                async for message in call:
                    course.before_response()
                    deltas = answer.take(getattr(message, "response", message))
                    course.on_response()
                    for delta in deltas:
                        yield delta
            except grpc.aio.AioRpcError as error:
                is_open = told_error(error) is None
                pause_seconds = course.after_break(error)
                is_open = True
            except TimeoutError:
                pause_seconds = course.after_silence()
            else:
                break
            finally:
                call.cancel()
            await asyncio.sleep(pause_seconds)
        is_open = False
    finally:
        if is_open:
            await ways.leave(answer)
        await ways.close()


class _Course:
    """Where to go on after a break, and whether with `Resume` or with another attempt."""

    def __init__(self, answer: MigratingGeneration, ways: RouterRoutes, reattach_seconds: float) -> None:
        self._answer = answer
        self._ways = ways
        self._reattach_seconds = reattach_seconds
        self._is_resumable = answer.attempt.resumable
        self._gives_up_seconds = max(GIVE_UP_SECONDS, reattach_seconds) if self._is_resumable else reattach_seconds
        self._resumes = False
        """The next call is a Resume; else a Generate."""
        self._begins = True
        """It is another attempt; else the one at hand is asked for once more."""
        self._is_repeated = False
        self._goes_on = False
        """The router has said that it knows of `partial_choices`."""
        self._num_losses = 0
        self._num_breaks = 0
        """Since the last response."""
        self._broken_at = 0.0

    def next_call(self) -> Any:
        answer, stub = self._answer, self._ways.stub
        if self._resumes:
            name, token = answer.attempt.request_id, answer.attempt.resume_token
            return stub.Resume(ResumeRequest(request_id=name, resume_token=token, starting_after=answer.last_event))
        if self._begins:
            answer.begin()
            self._begins = self._is_repeated = self._goes_on = False
        return stub.Generate(answer.attempt)

    async def opened(self, call: Any) -> None:
        """The router has the call. Raises TimeoutError."""
        attempt = self._answer.attempt
        is_quick = self._resumes or attempt.resumable or bool(attempt.partial_choices)
        async with asyncio.timeout(OPEN_TIMEOUT_SECONDS if is_quick else None):
            metadata = await call.initial_metadata()
        if not self._resumes:
            self._ways.note_owner(metadata)
        self._goes_on = self._goes_on or any(key == CARRIED_KEY for key, _ in metadata or ())

    def before_response(self) -> None:
        """Raises KvloomError when it would begin anew."""
        if self._answer.attempt.partial_choices and not self._goes_on and not self._resumes:
            raise KvloomError(
                _R.ERROR_REASON_ROUTER_LOST, "The router was lost, and the other one is too old to go on."
            )

    def on_response(self) -> None:
        if self._num_breaks or self._num_losses == 0:
            self._ways.note_heard()
        self._is_resumable = self._answer.last_event > 0  # a router that resumes nothing does not number
        self._num_breaks = 0

    # -- after a break ------------------------------------------------------------------------------------------------

    def after_break(self, error: grpc.aio.AioRpcError) -> float:
        """How many seconds to wait for the next call. Raises KvloomError when there is none."""
        self._note_break()
        told = told_error(error)
        if told is not None:
            self._after_word(told)
            return self._pause_seconds(told)
        failure = from_rpc_error(error)
        if error.code() not in _BREAKS:
            raise failure from error
        if not self._resumes and not self._answer.is_attempt_heard:
            self._ways.note_owner(error.initial_metadata())
        if self._is_resumable:
            self._after_lost_connection(failure)
        elif self._answer.is_heard:
            self._lose(failure)
        elif error.code() is grpc.StatusCode.UNAVAILABLE and self._num_breaks < self._ways.num_routers:
            self._lose(failure)
            return 0.0
        else:
            raise failure from error
        return self._pause_seconds(failure)

    def after_silence(self) -> float:
        """As `after_break`, when a router did not say that it has the call."""
        self._note_break()
        self._num_breaks += -self._num_breaks % BREAKS_PER_ROUTER
        failure = KvloomError(_R.ERROR_REASON_ROUTER_LOST, "The router does not answer.", retry_after_seconds=1.0)
        if self._is_resumable:
            self._after_lost_connection(failure)
        else:
            self._lose(failure)
        return self._pause_seconds(failure)

    def _note_break(self) -> None:
        self._num_breaks += 1
        if self._num_breaks == 1:
            self._broken_at = time.monotonic()

    def _after_lost_connection(self, failure: KvloomError) -> None:
        has_others = self._ways.num_routers > 1 or self._ways.is_at_owner
        may_leave = bool(self._reattach_seconds) or not self._answer.is_heard
        if has_others and may_leave and self._num_breaks % BREAKS_PER_ROUTER == 0:
            self._lose(failure)
        else:
            self._resumes = True

    def _after_word(self, told: KvloomError) -> None:
        """The router has said that the attempt, or the Resume of it, is over."""
        answer = self._answer
        if self._resumes and told.reason in _LOST_HERE:
            not_found = told.reason == _R.ERROR_REASON_NOT_FOUND
            if not_found and self._ways.to_owner():
                return
            if not_found and not answer.is_attempt_heard:
                # Generate itself was lost on its way, perhaps; if it is only late, it is in the way of the next one.
                self._resumes = False
                self._is_repeated = True
            else:
                message = f"The answer cannot be taken up again. {told.message}"
                self._lose(KvloomError(_R.ERROR_REASON_ROUTER_LOST, message))
        elif self._is_repeated and told.reason == _R.ERROR_REASON_DUPLICATE_REQUEST_ID:
            self._resumes = True
        elif answer.is_attempt_heard:
            if told.reason != _R.ERROR_REASON_DRAINING:
                raise told
            self._lose(told)
        elif answer.is_heard:
            if told.reason not in _NOT_YET:
                raise told
            self._try_next()
        elif told.reason in ASK_ELSEWHERE and self._num_breaks < self._ways.num_routers:
            self._try_next()
        else:
            raise told

    def _lose(self, failure: KvloomError) -> None:
        """Its router is not waited for any longer."""
        answer = self._answer
        self._ways.give_up(answer.settlement())
        self._num_losses += answer.is_attempt_heard
        if answer.is_heard and (not self._reattach_seconds or self._num_losses > MAX_LOSSES):
            raise failure
        self._try_next()

    def _try_next(self) -> None:
        self._ways.to_next()
        self._resumes = False
        self._begins = True

    def _pause_seconds(self, failure: KvloomError) -> float:
        if time.monotonic() - self._broken_at > self._gives_up_seconds:
            self._ways.give_up(self._answer.settlement())
            raise failure
        pause_seconds = min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._num_breaks - 1, 10), LONGEST_PAUSE_SECONDS)
        return pause_seconds * random.uniform(0.5, 1.0)
