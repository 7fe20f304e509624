"""The router's end of one client's data plane: `RouterService.Connect`.

Requests come in and steps go out, all multiplexed by slot. Nothing waits on a client: its news piles up in a bounded
outbox, and every time its writer wakes up everything that is there leaves as one frame.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from typing import Final

import grpc
import structlog

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
from router import convert
from router.core.actions import FleetChanged
from router.core.events import ClientGone, RequestArrived, SlotsCancelled
from router.core.frames import Finish, Step
from router.core_driver import CoreDriver
from router.intake import MAX_NAME_CHARS, Intake
from router.links.link_sessions import LinkSessions
from router.links.step_outbox import MAX_WAITING_ENTRIES, StepOutbox
from router.links.submit_queue import SubmitQueue

log = structlog.get_logger()

HELLO_TIMEOUT_SECONDS: Final = 10.0
FLUSH_SECONDS: Final = 0.5
"""How long the last frames may take on their way to a client whose stream ends."""
MAX_OPEN_SLOTS: Final = 65_536
"""Sequences that one client may have under way."""

_numbers = itertools.count(1)

Context = grpc.aio.ServicerContext[RouterServiceConnectRequest, RouterServiceConnectResponse]


class ClientLink:
    """One client's stream, from its hello to its end."""

    def __init__(
        self,
        dispatcher: CoreDriver,
        intake: Intake,
        context: Context,
        named_links: LinkSessions,
        router_address: str = "",
        incarnation_id: str = "",
        max_waiting_entries: int = MAX_WAITING_ENTRIES,
    ) -> None:
        """`router_address`: where this router listens and no other does. `incarnation_id`: as it is announced."""
        self._dispatcher = dispatcher
        self._intake = intake
        self._context = context
        self._named_links = named_links
        self._router_address = router_address
        self._incarnation_id = incarnation_id
        self._link_id = ""
        self._client_id = ""
        self._outbox = StepOutbox(max_waiting_entries)
        self._fleet: FleetChanged | None = None
        self._open_slots: set[int] = set()
        self._inbox = SubmitQueue(self._on_submit, self._on_cancel, self._end_with, self._finish_if_done)
        # Without an interval: tokens are metered by now, and what a router has not written is lost with it.
        self._writer = FrameWriter(context, self._take_response)
        self._ended: asyncio.Future[KvloomError | None] = asyncio.get_running_loop().create_future()
        self._half_closed = False
        self._has_left = False

    async def serve(self) -> None:
        """Until the client goes, breaks the protocol or reads too slowly, or `end` is called."""
        try:
            await self._read_hello()
        except KvloomError as error:
            await abort(self._context, error)
        self._dispatcher.add_client(self._client_id, self)
        self.send_fleet(self._dispatcher.core.fleet)
        reader = asyncio.create_task(self._read_frames(), name=f"{self._client_id} reader")
        writer = asyncio.create_task(self._writer.run(), name=f"{self._client_id} writer")
        try:
            await asyncio.wait([reader, writer, self._ended], return_when=asyncio.FIRST_COMPLETED)
            self.leave()
            # gRPC takes no status while the stream's first message is being written: the writer is not cut short
            # unless the client does not read.
            await asyncio.wait([writer], timeout=FLUSH_SECONDS)
        finally:
            self.leave()  # before anything is awaited: this task may be cancelled once more
            reader.cancel()
            writer.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
        await self._finish_stream(results)

    def end(self) -> None:
        """Close the stream in good order (the router stops)."""
        self._end_with(None)

    @property
    def client_id(self) -> str:
        """As the core knows this stream."""
        return self._client_id

    # -- ClientPeer ---------------------------------------------------------------------------------------------------

    def send_step(self, step: Step) -> None:
        if step.finishes:
            self._open_slots.difference_update([finish.slot for finish in step.finishes])
            self._finish_if_done()
        if not self._outbox.add(step):
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
            raise protocol_violation("No hello came.") from None
        if not isinstance(frame, RouterServiceConnectRequest) or not frame.hello.client_id:
            raise protocol_violation("The first frame must carry a hello with a client_id.")
        if frame.submits or frame.cancel_slots:
            raise protocol_violation("The first frame carries nothing but the hello.")
        # Clients choose their names freely; two of one name must not get each other's news.
        self._client_id = f"{frame.hello.client_id[:MAX_NAME_CHARS]}#{next(_numbers)}"
        self._link_id = frame.hello.link_id[:MAX_NAME_CHARS]
        if self._link_id:
            self._named_links.open(self._link_id, self)
        self._on_lost(frame.hello.lost)
        log.info("client connected", client_id=self._client_id)

    async def _read_frames(self) -> None:
        await deliver(self._context, RouterServiceConnectRequest, self._on_frame)  # until the client sends no more
        self._half_closed = True
        self._finish_if_done()
        await self._ended  # what it has asked for is still answered: the writer ends the stream

    def _on_frame(self, frame: RouterServiceConnectRequest) -> None:
        if self._has_left:
            return
        if frame.HasField("hello"):
            raise protocol_violation("Only the first frame carries a hello.")
        self._on_lost(frame.lost)  # what is submitted next may be the same request, going on
        self._inbox.add(frame)

    def _on_lost(self, lost: Iterable[LostRequest]) -> None:
        for one in lost:
            link_id = one.link_id[:MAX_NAME_CHARS] or self._link_id
            self._named_links.settle(link_id, one.request_id, one.num_received_tokens, speaker=self)

    def _on_submit(self, submit: Submit) -> None:
        slots = [choice.slot for choice in submit.choices]
        if not slots:
            raise protocol_violation(f"Request {submit.request_id!r} has no choices, so nothing can answer it.")
        if len(set(slots)) < len(slots) or not self._open_slots.isdisjoint(slots):
            raise protocol_violation(f"Request {submit.request_id!r} uses a slot that is still in use.")
        self._open_slots.update(slots)
        if len(self._open_slots) > MAX_OPEN_SLOTS:
            raise protocol_violation(f"More than {MAX_OPEN_SLOTS} slots are in use.")
        try:
            request = self._intake.request_from_submit(submit, self._client_id)
        except KvloomError as error:
            self._refuse(slots, error)
            return
        self._dispatcher.dispatch(RequestArrived(request))

    def _on_cancel(self, slots: Sequence[int]) -> None:
        self._dispatcher.dispatch(SlotsCancelled(self._client_id, slots))

    def _refuse(self, slots: Iterable[int], error: KvloomError) -> None:
        """The request is at fault, the stream goes on."""
        self._dispatcher.refused(error)
        self.send_step(Step(finishes=[Finish(slot, FINISH_REASON_ERROR, error=error) for slot in slots]))

    def _take_response(self) -> RouterServiceConnectResponse | None:
        """Everything that waits, as one frame."""
        step = self._outbox.take()
        fleet, self._fleet = self._fleet, None
        if step is None and fleet is None:
            return None
        response = RouterServiceConnectResponse()
        if fleet is not None:
            response.fleet.CopyFrom(convert.fleet_to_proto(fleet))
            response.router_address = self._router_address
            response.incarnation_id = self._incarnation_id
        if step is not None:
            convert.fill_frame(response.step, step)
        return response

    def _finish_if_done(self) -> None:
        """The client sends no more, and has an answer to all that it has sent."""
        if self._half_closed and not self._open_slots and not self._inbox:
            self._writer.finish()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_with(self, error: KvloomError | None) -> None:
        if not self._ended.done():
            self._ended.set_result(error)
        self._writer.finish()

    def leave(self) -> None:
        """Cancel what its client has open. Repeatable. What is in the outbox can still be written, nothing is added."""
        if self._has_left:
            return
        self._has_left = True
        self._inbox.clear()
        self._dispatcher.remove_client(self._client_id)
        self._dispatcher.dispatch(ClientGone(self._client_id))
        self._named_links.close(self._link_id, self)
        self._end_with(None)
        log.info("client gone", client_id=self._client_id)

    async def _finish_stream(self, results: Sequence[BaseException | None]) -> None:
        """Tell the client why, if there is a reason to tell."""
        error = self._ended.result()
        for result in results:
            if isinstance(result, KvloomError):
                error = error or result
            elif isinstance(result, Exception) and not isinstance(result, grpc.RpcError | asyncio.InvalidStateError):
                log.error("client stream failed", client_id=self._client_id, exc_info=result)
                error = error or KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The router failed on this stream.")
        if error is not None:
            await abort(self._context, error)
