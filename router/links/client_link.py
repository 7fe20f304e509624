"""The router's end of one client's data plane: `RouterService.Connect`.

Requests come in and steps go out, all multiplexed by slot. Nothing waits for a client: its steps collect in a bounded
outbox, and whenever the stream's writer wakes up, everything in the outbox is sent as one frame.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from kvloom.errors import KvloomError, protocol_violation
from kvloom.transport.frame_writer import FrameWriter
from kvloom.transport.grpc_errors import abort
from kvloom.transport.local_stream import deliver
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR
from kvloom.v1.router_service_pb2 import (
    LostRequest,
    RouterServiceConnectRequest,
    RouterServiceConnectResponse,
    Submit,
)
from kvloom_common.transport.checked_server import malformed_message
from router import convert
from router.caller_scope import TRUSTED, CallerScope
from router.core.actions import FleetChanged
from router.core.events import ClientGone, RequestArrived, SlotsCancelled
from router.core.frames import Finish, Step
from router.core_driver import CoreDriver
from router.links.link_sessions import LinkSessions
from router.links.step_outbox import StepOutbox
from router.links.submit_queue import SubmitQueue
from router.prompt_checks import MAX_NAME_CHARS
from router.request_validator import RequestValidator

log = structlog.get_logger()

HELLO_TIMEOUT_SECONDS: Final = 10.0
FLUSH_SECONDS: Final = 0.5
"""How long the last frames of an ending stream may take to reach the client."""
MAX_OPEN_SLOTS: Final = 65_536
"""The most sequences that one client may have in flight."""

_numbers = itertools.count(1)

Context = grpc.aio.ServicerContext[RouterServiceConnectRequest, RouterServiceConnectResponse]


class ClientLink:
    """Serves one client's stream, from its hello to its end."""

    def __init__(
        self,
        driver: CoreDriver,
        intake: RequestValidator,
        context: Context,
        link_sessions: LinkSessions,
        router_address: str = "",
        incarnation_id: str = "",
        scope: CallerScope = TRUSTED,
    ) -> None:
        """`router_address` is one where this router listens and no other does. `incarnation_id` is the one that the
        router announces in the registry."""
        self._driver = driver
        self._intake = intake
        self._context = context
        self._link_sessions = link_sessions
        self._router_address = router_address
        self._incarnation_id = incarnation_id
        self._scope = scope
        self._link_id = ""
        self._client_id = ""
        self._outbox = StepOutbox()
        self._fleet: FleetChanged | None = None
        self._open_slots: set[int] = set()
        self._submit_queue = SubmitQueue(
            self._on_submit, self._on_cancel, self._end_with, self._finish_if_done, self._on_discarded
        )
        # The writer has no flush interval: tokens are already metered here, and those that a router has not written
        # are lost if it crashes.
        self._writer = FrameWriter(context, self._take_response)
        self._ended: asyncio.Future[KvloomError | None] = asyncio.get_running_loop().create_future()
        self._half_closed = False
        self._has_left = False

    async def serve(self) -> None:
        """Returns when the client disconnects, breaks the protocol or reads too slowly, or when `end` is called."""
        try:
            await self._read_hello()
        except KvloomError as error:
            await abort(self._context, error)
        self._driver.add_client(self._client_id, self)
        self.send_fleet(self._driver.core.fleet)
        reader = asyncio.create_task(self._read_frames(), name=f"{self._client_id} reader")
        writer = asyncio.create_task(self._writer.run(), name=f"{self._client_id} writer")
        try:
            await asyncio.wait([reader, writer, self._ended], return_when=asyncio.FIRST_COMPLETED)
            self.leave()
            # gRPC accepts no status while the stream's first message is being written, so the writer is cut short only
            # if the client does not read.
            await asyncio.wait([writer], timeout=FLUSH_SECONDS)
        finally:
            self.leave()  # This comes before any await because this task may be cancelled once more.
            reader.cancel()
            writer.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
        await self._finish_stream(results)

    def end(self) -> None:
        """Closes the stream cleanly because the router stops."""
        self._end_with(None)

    @property
    def client_id(self) -> str:
        """The core's id for this stream."""
        return self._client_id

    # -- ClientSink ---------------------------------------------------------------------------------------------------

    def send_step(self, step: Step) -> None:
        if step.finishes:
            self._open_slots.difference_update([finish.slot for finish in step.finishes])
            self._finish_if_done()
        if not self._outbox.add(step) and self._outbox.is_behind(len(self._open_slots) + len(step.finishes)):
            self._end_with(
                KvloomError(
                    ErrorReason.ERROR_REASON_CLIENT_TOO_SLOW,
                    "This stream was not read fast enough: too much output was waiting for it.",
                )
            )
        self._writer.wake()

    def send_fleet(self, fleet: FleetChanged) -> None:
        self._fleet = fleet
        self._writer.wake()

    # -- the stream ---------------------------------------------------------------------------------------------------

    async def _read_hello(self) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                frame = await self._context.read()
        except TimeoutError:
            raise protocol_violation("The client sent no hello in time.") from None
        if not isinstance(frame, RouterServiceConnectRequest) or not frame.hello.client_id:
            raise protocol_violation("The first frame must carry a hello with a client_id.")
        if frame.submits or frame.cancel_slots:
            raise protocol_violation("The first frame must carry nothing but the hello.")
        # Clients choose their names freely, and two clients of one name must not receive each other's steps.
        self._client_id = f"{frame.hello.client_id[:MAX_NAME_CHARS]}#{next(_numbers)}"
        self._link_id = self._scope.link_id(frame.hello.link_id[:MAX_NAME_CHARS])
        if self._link_id:
            self._link_sessions.open(self._link_id, self)
        self._on_lost(frame.hello.lost)
        log.info("client_connected", client_id=self._client_id)

    async def _read_frames(self) -> None:
        await deliver(self._context, RouterServiceConnectRequest, self._on_frame)  # returns once the client half-closes
        self._half_closed = True
        self._finish_if_done()
        await self._ended  # Requests in flight are still answered; then the writer ends the stream.

    def _on_frame(self, frame: RouterServiceConnectRequest) -> None:
        if self._has_left:
            return
        if frame.HasField("hello"):
            raise protocol_violation("Only the first frame may carry a hello.")
        self._on_lost(frame.lost)  # This comes first because the frame may also submit the same request, to resume it.
        self._submit_queue.add(frame)

    def _on_lost(self, lost: Iterable[LostRequest]) -> None:
        for request in lost:
            link_id = self._scope.link_id(request.link_id[:MAX_NAME_CHARS]) or self._link_id
            request_id = self._scope.request_id(request.request_id)
            self._link_sessions.settle(link_id, request_id, request.num_received_tokens, reported_by=self)

    def _on_submit(self, submit: Submit) -> None:
        slots = [choice.slot for choice in submit.choices]
        if not slots:
            raise protocol_violation(f"Request {submit.request.request_id!r} has no choices, so it cannot be answered.")
        if len(set(slots)) < len(slots) or not self._open_slots.isdisjoint(slots):
            raise protocol_violation(f"Request {submit.request.request_id!r} uses a slot that is still in use.")
        self._open_slots.update(slots)
        if len(self._open_slots) > MAX_OPEN_SLOTS:
            raise protocol_violation(f"More than {MAX_OPEN_SLOTS} slots are in use.")
        try:
            request = self._intake.request_from_submit(submit, self._client_id, self._scope)
        except KvloomError as error:
            self._refuse(slots, error)
            return
        self._driver.dispatch(RequestArrived(request))

    def _on_cancel(self, slots: Sequence[int]) -> None:
        self._driver.dispatch(SlotsCancelled(self._client_id, slots))

    def _on_discarded(self, request_ids: Sequence[str]) -> None:
        if self._scope is TRUSTED:  # others could have their answers for nothing
            self._driver.answers_discarded(self._client_id, request_ids)

    def _refuse(self, slots: Iterable[int], error: KvloomError) -> None:
        """Fails the request and keeps the stream open."""
        self._driver.request_refused(error)
        self.send_step(Step(finishes=[Finish(slot, FINISH_REASON_ERROR, error=error) for slot in slots]))

    def _take_response(self) -> RouterServiceConnectResponse | None:
        """Returns everything that waits as one frame, or None when nothing does."""
        step = self._outbox.take()
        fleet, self._fleet = self._fleet, None
        if step is None and fleet is None:
            return None
        response = RouterServiceConnectResponse()
        if fleet is not None:
            response.fleet.CopyFrom(self._intake.fleet_shown(convert.fleet_to_proto(fleet), self._scope))
            response.router_address = self._router_address
            response.incarnation_id = self._incarnation_id
        if step is not None:
            convert.fill_frame(response.step, step)
        return response

    def _finish_if_done(self) -> None:
        """Ends the stream once the client has half-closed it and all its requests have been answered."""
        if self._half_closed and not self._open_slots and not self._submit_queue:
            self._writer.finish()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_with(self, error: KvloomError | None) -> None:
        if not self._ended.done():
            self._ended.set_result(error)
        self._writer.finish()

    def leave(self) -> None:
        """Cancels the client's open requests. The outbox can still be written, but nothing is added to it. Calling
        this again has no effect."""
        if self._has_left:
            return
        self._has_left = True
        self._submit_queue.clear()
        self._driver.remove_client(self._client_id)
        self._driver.dispatch(ClientGone(self._client_id))
        self._link_sessions.close(self._link_id, self)
        self._end_with(None)
        log.info("client_disconnected", client_id=self._client_id)

    async def _finish_stream(self, results: Sequence[BaseException | None]) -> None:
        """Ends the stream with an error status if there is an error."""
        error = self._ended.result()
        for result in results:
            if isinstance(result, KvloomError):
                error = error or result
            elif isinstance(result, DecodeError):
                error = error or malformed_message()
            elif isinstance(result, Exception) and not isinstance(result, grpc.RpcError | asyncio.InvalidStateError):
                log.error("client_stream_failed", client_id=self._client_id, exc_info=result)
                error = error or KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The router failed on this stream.")
        if error is not None:
            await abort(self._context, error)
