"""A resumable `Generate` whose reader sees no break: when the connection is lost, `Resume` goes on where it was."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

import grpc

from kvloom.errors import KvloomError
from kvloom.grpc_errors import from_rpc_error, told_error
from kvloom.v1 import router_service_pb2_grpc
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import CancelRequest, GenerateRequest, GenerateResponse, ResumeRequest

FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0
GIVE_UP_SECONDS: Final = 30.0
"""Without a response after a break: the router's own grace period is over by then, as a rule."""
CANCEL_TIMEOUT_SECONDS: Final = 2.0
TOKEN_BYTES: Final = 24

# What gRPC itself says when a connection breaks or cannot be made.
_BREAKS: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)


async def resumed_responses(
    stub: router_service_pb2_grpc.RouterServiceStub, request: GenerateRequest
) -> AsyncGenerator[GenerateResponse, None]:
    """The responses of `request`, which has a request_id, each once and in order. Raises KvloomError: the answer's own,
    or ROUTER_LOST when it cannot be taken up again. Closing the generator early cancels the request."""
    request.resumable = True
    request.resume_token = request.resume_token or secrets.token_urlsafe(TOKEN_BYTES)
    progress = _Progress()
    settled = False
    try:
        while True:
            call: Any = stub.Resume(_resume_of(request, progress)) if progress.resumes else stub.Generate(request)
            try:
                async for message in call:
                    response = message.response if progress.resumes else message
                    progress.note(response.event_number)
                    yield response
            except grpc.aio.AioRpcError as error:
                settled = told_error(error) is not None
                pause_seconds = progress.after_break(error)
                settled = False
            else:
                settled = True
                return
            finally:
                call.cancel()
            await asyncio.sleep(pause_seconds)
    finally:
        if not settled:
            await _cancel(stub, request.request_id)


class _Progress:
    """What has been read, and whether to go on after a break."""

    def __init__(self) -> None:
        self.resumes = False
        """The next call is a Resume."""
        self.last_event = 0
        self._is_repeated = False
        self._may_resume = True
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._broken_at: float | None = None

    def note(self, event_number: int) -> None:
        self.last_event = event_number
        self._may_resume = event_number > 0  # a router that resumes nothing does not number
        self._broken_at = None
        self._pause_seconds = FIRST_PAUSE_SECONDS

    def after_break(self, error: grpc.aio.AioRpcError) -> float:
        """How many seconds to wait for the next call. Raises KvloomError when there is none."""
        told = told_error(error)
        if told is None and error.code() in _BREAKS and self._may_resume:
            self.resumes = True
        elif told is not None and self._is_unheard_of(told):
            # Generate itself was lost on its way, perhaps; if it is only late, it is in the way of the next one.
            self.resumes = False
            self._is_repeated = True
        elif told is not None and self._is_repeated and told.reason == ErrorReason.ERROR_REASON_DUPLICATE_REQUEST_ID:
            self.resumes = True
        elif told is not None and self.resumes and told.reason == ErrorReason.ERROR_REASON_NOT_FOUND:
            message = f"The answer cannot be taken up again. {told.message}"
            raise KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, message) from error
        else:
            raise from_rpc_error(error) from error
        now = time.monotonic()
        if self._broken_at is None:
            self._broken_at = now
        elif now - self._broken_at > GIVE_UP_SECONDS:
            raise from_rpc_error(error) from error
        pause_seconds = self._pause_seconds * random.uniform(0.5, 1.0)
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        return pause_seconds

    def _is_unheard_of(self, told: KvloomError) -> bool:
        """The router knows no such answer, and never sent anything of it."""
        return self.resumes and not self.last_event and told.reason == ErrorReason.ERROR_REASON_NOT_FOUND


def _resume_of(request: GenerateRequest, progress: _Progress) -> ResumeRequest:
    return ResumeRequest(
        request_id=request.request_id, resume_token=request.resume_token, starting_after=progress.last_event
    )


async def _cancel(stub: router_service_pb2_grpc.RouterServiceStub, request_id: str) -> None:
    """Nobody will come back for it: it need not go on for the grace period."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await stub.Cancel(CancelRequest(request_id=request_id), timeout=CANCEL_TIMEOUT_SECONDS)
