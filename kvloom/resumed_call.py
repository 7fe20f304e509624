"""A resumable `Generate` whose reader sees no break: when the connection is lost, `Resume` goes on where it was."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final
from urllib.parse import unquote

import grpc

from kvloom.errors import KvloomError
from kvloom.grpc_errors import from_rpc_error, told_error
from kvloom.router_link import CHANNEL_OPTIONS
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import CancelRequest, GenerateRequest, GenerateResponse, ResumeRequest
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub

ADDRESS_KEY: Final = "kvloom-router-address"
"""In the initial metadata of a resumable Generate: where the router listens that nobody else does. Percent-encoded."""
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 2.0
GIVE_UP_SECONDS: Final = 30.0
"""Without a response after a break: the router's own grace period is over by then, as a rule."""
BREAKS_PER_ROUTER: Final = 3
"""Before another router is asked for an answer that has not begun."""
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
    stubs: Sequence[RouterServiceStub], request: GenerateRequest
) -> AsyncGenerator[GenerateResponse, None]:
    """The responses of `request`, which has a request_id, each once and in order. `stubs`: of the routers, in the order
    in which they should be asked. Raises KvloomError: the answer's own, or ROUTER_LOST when it cannot be taken up
    again. Closing the generator early cancels the request."""
    request.resumable = True
    request.resume_token = request.resume_token or secrets.token_urlsafe(TOKEN_BYTES)
    ways = _Ways(stubs)
    progress = _Progress(ways)
    settled = False
    try:
        while True:
            resumes = progress.resumes
            call: Any = ways.stub.Resume(_resume_of(request, progress)) if resumes else ways.stub.Generate(request)
            try:
                async for message in call:
                    response = message.response if resumes else message
                    if not resumes and not progress.last_event:
                        ways.note_owner(await call.initial_metadata())
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
            await _cancel(ways.stub, request.request_id)
        await ways.close()


class _Ways:
    """To the routers, and in particular to the one that has the answer: where several share an address, a new
    connection may end at another one."""

    def __init__(self, stubs: Sequence[RouterServiceStub]) -> None:
        self._stubs = stubs
        self._next = 0
        self.stub = stubs[0]
        """To be asked next."""
        self._owner_address = ""
        self._owner: grpc.aio.Channel | None = None

    def note_owner(self, metadata: Any) -> None:
        self._owner_address = next((unquote(str(value)) for key, value in metadata or () if key == ADDRESS_KEY), "")

    def to_owner(self) -> bool:
        """False: it has been asked, or is not known."""
        if not self._owner_address or self._owner is not None:
            return False
        self._owner = grpc.aio.insecure_channel(self._owner_address, options=CHANNEL_OPTIONS)
        self.stub = RouterServiceStub(self._owner)
        return True

    def to_next(self) -> bool:
        """Another router, for an answer that has not begun. False: there is none."""
        if len(self._stubs) == 1:
            return False
        self._next = (self._next + 1) % len(self._stubs)
        self.stub = self._stubs[self._next]
        return True

    async def close(self) -> None:
        if self._owner is not None:
            await self._owner.close()


class _Progress:
    """What has been read, and whether and where to go on after a break."""

    def __init__(self, ways: _Ways) -> None:
        self._ways = ways
        self.resumes = False
        """The next call is a Resume."""
        self.last_event = 0
        self._num_breaks = 0
        """Since the last response."""
        self._is_repeated = False
        self._may_resume = True
        self._broken_at = 0.0

    def note(self, event_number: int) -> None:
        self.last_event = event_number
        self._may_resume = event_number > 0  # a router that resumes nothing does not number
        self._num_breaks = 0

    def after_break(self, error: grpc.aio.AioRpcError) -> float:
        """How many seconds to wait for the next call. Raises KvloomError when there is none."""
        told = told_error(error)
        self._num_breaks += 1
        if told is not None:
            self._after_refusal(told, error)
        elif error.code() not in _BREAKS or not self._may_resume:
            raise from_rpc_error(error) from error
        else:
            if not self.resumes and not self.last_event:
                self._ways.note_owner(error.initial_metadata())
            unheard = not self.last_event and self._num_breaks % BREAKS_PER_ROUTER == 0
            self.resumes = not (unheard and self._ways.to_next())
        now = time.monotonic()
        if self._num_breaks == 1:
            self._broken_at = now
        elif now - self._broken_at > GIVE_UP_SECONDS:
            raise from_rpc_error(error) from error
        pause_seconds = min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._num_breaks - 1, 10), LONGEST_PAUSE_SECONDS)
        return pause_seconds * random.uniform(0.5, 1.0)

    def _after_refusal(self, told: KvloomError, error: grpc.aio.AioRpcError) -> None:
        not_found = self.resumes and told.reason == ErrorReason.ERROR_REASON_NOT_FOUND
        if not_found and self._ways.to_owner():
            return
        if not_found and not self.last_event:
            # Generate itself was lost on its way, perhaps; if it is only late, it is in the way of the next one.
            self.resumes = False
            self._is_repeated = True
        elif not_found:
            message = f"The answer cannot be taken up again. {told.message}"
            raise KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, message) from error
        elif self._is_repeated and told.reason == ErrorReason.ERROR_REASON_DUPLICATE_REQUEST_ID:
            self.resumes = True
        elif told.reason == ErrorReason.ERROR_REASON_DRAINING and not self.last_event and self._ways.to_next():
            self.resumes = False
        else:
            raise told from error


def _resume_of(request: GenerateRequest, progress: _Progress) -> ResumeRequest:
    return ResumeRequest(
        request_id=request.request_id, resume_token=request.resume_token, starting_after=progress.last_event
    )


async def _cancel(stub: RouterServiceStub, request_id: str) -> None:
    """Nobody will come back for it: it need not go on for the grace period."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        await stub.Cancel(CancelRequest(request_id=request_id), timeout=CANCEL_TIMEOUT_SECONDS)
