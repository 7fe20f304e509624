"""`Generate` whose reader sees no break.

When the connection of a resumable answer is lost, `Resume` continues it. When the router is lost, or the answer is not
resumable, another router (or the same one, when it is back) is asked to continue after what was received.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

import grpc

from kvloom.backoff import Backoff
from kvloom.client.generation import Delta
from kvloom.client.migrating_generation import MigratingGeneration
from kvloom.client.router_channels import ASK_ELSEWHERE, RouterChannels
from kvloom.client.router_routes import CONTINUES_KEY, RouterRoutes
from kvloom.errors import KvloomError
from kvloom.router_link.cancel_notifier import CancelNotifier
from kvloom.router_link.tracked_request import REFUSALS
from kvloom.transport.grpc_errors import error_from_peer, from_rpc_error
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import GenerateRequest, ResumeRequest

FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0
_BACKOFF: Final = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, jitter=lambda: random.uniform(0.5, 1.0))
GIVE_UP_SECONDS: Final = 30.0
"""How long a resumable answer is tried after a break without a response. By then the router's own grace period is over,
as a rule."""
BREAKS_PER_ROUTER: Final = 3
"""Breaks in a row before another router is asked."""
OPEN_TIMEOUT_SECONDS: Final = 4.0
"""How long a router may take to accept a call. One that hangs never does."""
MAX_LOSSES: Final = 5
"""How many routers may be lost with an answer. The answer itself may be what crashes them."""

# The codes that gRPC itself sets when a connection breaks or cannot be made.
_BREAKS: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)
_R = ErrorReason
_CANNOT_RESUME: Final = frozenset({_R.ERROR_REASON_NOT_FOUND, _R.ERROR_REASON_EVENTS_GONE})
"""The errors of a Resume when this router cannot continue the answer."""
_RETRYABLE_REFUSALS: Final = REFUSALS | ASK_ELSEWHERE | {_R.ERROR_REASON_MODEL_NOT_FOUND}
"""The errors with which a router rejects an answer of a lost router that it, or another one, might accept later."""


async def failover_deltas(
    routers: RouterChannels, request: GenerateRequest, reattach_seconds: float, cancel_notifier: CancelNotifier
) -> AsyncGenerator[Delta, None]:
    """Yields the deltas of `request`, which has a request_id, each once and in order.

    `reattach_seconds`: how long to look for a router that continues the answer; 0: do not look. Raises the answer's own
    KvloomError, or ROUTER_LOST when no router continues it. Closing the generator early cancels the request.
    """
    answer = MigratingGeneration(request)
    routes = RouterRoutes(routers, cancel_notifier)
    recovery = _CallRecovery(answer, routes, reattach_seconds)
    is_open = True
    try:
        while not answer.is_complete:
            call = recovery.next_call()
            try:
                await recovery.wait_until_accepted(call)
                async for message in call:
                    recovery.check_continuation()
                    deltas = answer.apply(getattr(message, "response", message))
                    recovery.on_response()
                    for delta in deltas:
                        yield delta
            except grpc.aio.AioRpcError as error:
                is_open = error_from_peer(error) is None  # an answer that the router itself ended needs no cancel
                pause_seconds = recovery.after_break(error)
                is_open = True
            except TimeoutError:
                pause_seconds = recovery.after_silence()
            else:
                break
            finally:
                call.cancel()
            await asyncio.sleep(pause_seconds)
        is_open = False
    finally:
        if is_open:
            await routes.cancel(answer)
        await routes.close()


class _CallRecovery:
    """Decides after each break which router to call next, and whether with `Resume` or with a new `Generate`."""

    def __init__(self, answer: MigratingGeneration, routes: RouterRoutes, reattach_seconds: float) -> None:
        self._answer = answer
        self._routes = routes
        self._reattach_seconds = reattach_seconds
        self._is_resumable = answer.current_request.resumable
        self._give_up_seconds = max(GIVE_UP_SECONDS, reattach_seconds) if self._is_resumable else reattach_seconds
        self._uses_resume = False
        """The next call is a Resume; otherwise a Generate."""
        self._needs_new_request = True
        """That Generate gets a new request; otherwise the current one is sent again."""
        self._is_repeated = False
        """The current request was sent more than once."""
        self._can_continue = False
        """The router has reported that it supports `partial_choices`."""
        self._num_losses = 0
        self._num_breaks = 0
        """The number of breaks since the last response."""
        self._broken_at = 0.0

    def next_call(self) -> Any:
        """Start the next call, a Resume or a Generate."""
        answer, stub = self._answer, self._routes.stub
        if self._uses_resume:
            name, token = answer.current_request.request_id, answer.current_request.resume_token
            return stub.Resume(ResumeRequest(request_id=name, resume_token=token, starting_after=answer.last_event))
        if self._needs_new_request:
            answer.next_request()
            self._needs_new_request = self._is_repeated = self._can_continue = False
        return stub.Generate(answer.current_request)

    async def wait_until_accepted(self, call: Any) -> None:
        """Return when the router has accepted the call. Raises TimeoutError."""
        attempt = self._answer.current_request
        is_quick = self._uses_resume or attempt.resumable or bool(attempt.partial_choices)
        async with asyncio.timeout(OPEN_TIMEOUT_SECONDS if is_quick else None):
            metadata = await call.initial_metadata()
        if not self._uses_resume:
            self._routes.note_owner(metadata)
        self._can_continue = self._can_continue or any(key == CONTINUES_KEY for key, _ in metadata or ())

    def check_continuation(self) -> None:
        """Raises KvloomError when the router would generate the answer again from its beginning."""
        if self._answer.current_request.partial_choices and not self._can_continue and not self._uses_resume:
            raise KvloomError(
                _R.ERROR_REASON_ROUTER_LOST, "The router was lost, and the other one is too old to continue the answer."
            )

    def on_response(self) -> None:
        """A response has arrived."""
        if self._num_breaks or self._num_losses == 0:
            self._routes.note_heard()
        self._is_resumable = self._answer.last_event > 0  # a router that cannot resume does not number events
        self._num_breaks = 0

    # -- after a break ------------------------------------------------------------------------------------------------

    def after_break(self, error: grpc.aio.AioRpcError) -> float:
        """The seconds to wait before the next call. Raises KvloomError when there is none."""
        self._note_break()
        peer_error = error_from_peer(error)
        if peer_error is not None:
            self._after_peer_error(peer_error)
            return self._pause_seconds(peer_error)
        failure = from_rpc_error(error)
        if error.code() not in _BREAKS:
            raise failure from error
        if not self._uses_resume and not self._answer.has_response_from_router:
            self._routes.note_owner(error.initial_metadata())
        if self._is_resumable:
            self._after_lost_connection(failure)
        elif self._answer.has_response:
            self._abandon_router(failure)
        elif error.code() is grpc.StatusCode.UNAVAILABLE and self._num_breaks < self._routes.num_routers:
            self._abandon_router(failure)
            return 0.0
        else:
            raise failure from error
        return self._pause_seconds(failure)

    def after_silence(self) -> float:
        """Like `after_break`, for a router that did not accept the call in time."""
        self._note_break()
        self._num_breaks += -self._num_breaks % BREAKS_PER_ROUTER
        failure = KvloomError(_R.ERROR_REASON_ROUTER_LOST, "The router does not answer.", retry_after_seconds=1.0)
        if self._is_resumable:
            self._after_lost_connection(failure)
        else:
            self._abandon_router(failure)
        return self._pause_seconds(failure)

    def _note_break(self) -> None:
        self._num_breaks += 1
        if self._num_breaks == 1:
            self._broken_at = time.monotonic()

    def _after_lost_connection(self, failure: KvloomError) -> None:
        has_others = self._routes.num_routers > 1 or self._routes.is_at_owner
        may_leave = bool(self._reattach_seconds) or not self._answer.has_response
        if has_others and may_leave and self._num_breaks % BREAKS_PER_ROUTER == 0:
            self._abandon_router(failure)
        else:
            self._uses_resume = True

    def _after_peer_error(self, peer_error: KvloomError) -> None:
        """The router itself has ended the request, or rejected the Resume of it."""
        answer = self._answer
        if self._uses_resume and peer_error.reason in _CANNOT_RESUME:
            not_found = peer_error.reason == _R.ERROR_REASON_NOT_FOUND
            if not_found and self._routes.to_owner():
                return
            if not_found and not answer.has_response_from_router:
                # The Generate may have been lost on its way. If it is only late, the next one is a duplicate of it.
                self._uses_resume = False
                self._is_repeated = True
            else:
                message = f"The answer cannot be resumed. {peer_error.message}"
                self._abandon_router(KvloomError(_R.ERROR_REASON_ROUTER_LOST, message))
        elif self._is_repeated and peer_error.reason == _R.ERROR_REASON_DUPLICATE_REQUEST_ID:
            self._uses_resume = True
        elif answer.has_response_from_router:
            if peer_error.reason != _R.ERROR_REASON_DRAINING:
                raise peer_error
            self._abandon_router(peer_error)
        elif answer.has_response:
            if peer_error.reason not in _RETRYABLE_REFUSALS:
                raise peer_error
            self._move_to_next_router()
        elif peer_error.reason in ASK_ELSEWHERE and self._num_breaks < self._routes.num_routers:
            self._move_to_next_router()
        else:
            raise peer_error

    def _abandon_router(self, failure: KvloomError) -> None:
        """Stop waiting for the current router, and try the next one. Raises `failure` when that is not allowed."""
        answer = self._answer
        self._routes.give_up(answer.settlement())
        self._num_losses += answer.has_response_from_router
        if answer.has_response and (not self._reattach_seconds or self._num_losses > MAX_LOSSES):
            raise failure
        self._move_to_next_router()

    def _move_to_next_router(self) -> None:
        self._routes.to_next()
        self._uses_resume = False
        self._needs_new_request = True

    def _pause_seconds(self, failure: KvloomError) -> float:
        if time.monotonic() - self._broken_at > self._give_up_seconds:
            self._routes.give_up(self._answer.settlement())
            raise failure
        return _BACKOFF.delay_seconds(self._num_breaks - 1)
