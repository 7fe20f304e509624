"""The client side of the data plane: one long-lived stream to a router, all requests multiplexed by slot.

`RouterLink` is the interface for the edge and the SDK; `GrpcRouterLink` implements it over gRPC or a local socket.
Progress is delivered by plain calls on a `Sink`, with no task, queue or future per request, so a sink must not block.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import grpc

from kvloom.errors import KvloomError
from kvloom.router_link.identity import LinkIdentity
from kvloom.router_link.open_choices import OpenChoices, Sink
from kvloom.router_link.request import ChoiceProgress, LinkRequest
from kvloom.text.token_ids import pack_token_ids
from kvloom.transport.channel_options import OpenChannel, open_plain_channel
from kvloom.transport.frame_writer import FrameWriter
from kvloom.transport.grpc_errors import error_from_peer, from_rpc_error
from kvloom.transport.local_client import connect_local
from kvloom.transport.local_stream import LocalStream, deliver
from kvloom.v1 import generation_pb2, overview_pb2_grpc, router_service_pb2, router_service_pb2_grpc
from kvloom.v1.error_reason_pb2 import ErrorReason

__all__ = ["ChoiceProgress", "GrpcRouterLink", "LinkRequest", "RouterLink", "Sink"]

log = logging.getLogger(__name__)
"""The standard library's logger: in an SDK user's process structlog is not configured, and would print to stdout."""

RECONNECT_SECONDS: Final = 0.2
MODERATE_TIMEOUT_SECONDS: Final = 30.0
MAX_PENDING_FRAME_PARTS: Final = 16_384
MAX_FRAME_BYTES: Final = 8 * 2**20
"""Submits beyond this size wait for the next frame. With one more it is far below the limit of a message."""
BYTES_PER_TOKEN: Final = 8
"""The usual size of a prompt's token: its id, and its text."""

ConnectCall = (
    LocalStream[router_service_pb2.RouterServiceConnectResponse, router_service_pb2.RouterServiceConnectRequest]
    | grpc.aio.StreamStreamCall[
        router_service_pb2.RouterServiceConnectRequest, router_service_pb2.RouterServiceConnectResponse
    ]
)


class WrongRouterError(Exception):
    """Another process listens at the router's address."""


class RouterLink(Protocol):
    """A connection to a router, or to several. All methods are called on the event loop."""

    @property
    def fleet(self) -> router_service_pb2.FleetState:
        """The models that the router can serve, as it last reported; empty while there is no connection."""
        ...

    @property
    def connected(self) -> bool: ...

    async def wait_fleet_change(self) -> None:
        """Return after the next change of `fleet` or `connected`."""
        ...

    def submit(self, request: LinkRequest, sink: Sink) -> int:
        """Send a request; returns a handle for `cancel`. Raises KvloomError (ROUTER_LOST) while there is no
        connection. When the connection breaks, every open choice finishes with ROUTER_LOST."""
        ...

    def cancel(self, handle: int) -> None:
        """Cancel all choices of a request; its sink is not called again. Unknown handles are ignored. A sink may call
        it."""
        ...

    def discard(self, request_ids: Sequence[str]) -> None:
        """Say that the answers of these requests, which have ended or were cancelled, are delivered to nobody: they are
        not billed. Without effect at a router to which there is no connection any more."""
        ...

    async def moderate(self, request: router_service_pb2.ModerateRequest) -> router_service_pb2.ModerateResponse:
        """Ask which categories of the safety policy texts belong to. Raises KvloomError (ROUTER_LOST, INVALID_ARGUMENT,
        SAFETY_UNAVAILABLE, REQUEST_TOO_LARGE)."""
        ...

    async def charge_call(self, request: router_service_pb2.ChargeCallRequest) -> router_service_pb2.ChargeCallResponse:
        """Charge a call that computes no answer to a tenant's limits. Raises KvloomError (ROUTER_LOST, RATE_LIMITED,
        REQUEST_TOO_LARGE, OVERLOADED)."""
        ...

    async def ask_all(self, method: str, request: Any) -> list[Any]:
        """The answers of all routers that are connected to a call of OverviewService; those that fail are left out.
        Raises KvloomError if none answers."""
        ...

    async def close(self) -> None: ...


class GrpcRouterLink:
    """RouterLink over `RouterService.Connect`; reconnects by itself."""

    def __init__(
        self,
        address: str,
        client_id: str,
        on_fleet_change: Callable[[], None] = lambda: None,
        open_channel: OpenChannel = open_plain_channel,
    ) -> None:
        """`on_fleet_change` is called whenever `fleet` or `connected` has changed."""
        self._open_channel = open_channel
        self._address = address
        self._client_id = client_id
        self.identity = LinkIdentity()
        """Set before `start` when there was a link to this router before."""
        self.expected_incarnation_id = ""
        """The incarnation that a new connection must reach; "": any is accepted."""
        self._on_fleet_change = on_fleet_change
        self._fleet = router_service_pb2.FleetState()
        self._connected = False
        self.owner_address = ""
        """The address at which only the connected router listens. "" while it is not known, or if it is the address
        that the link connects to: then the next connection reaches the same router."""
        self.refusal: KvloomError | None = None
        """Why the router has ended the last connection, in its own words; None while there is one, and if it did not
        say."""
        self._heard_at = 0.0
        """The time of the last frame, or of the first request since none was open."""
        self._choices = OpenChoices(self.cancel)
        self._submits: list[tuple[LinkRequest, Sequence[int]]] = []
        self._cancels: list[int] = []
        self._discarded: list[str] = []
        self._writer: FrameWriter[router_service_pb2.RouterServiceConnectRequest] | None = None
        self._task: asyncio.Task[None] | None = None
        self._call_channel: grpc.aio.Channel | None = None
        """For calls beside the stream; made when it is needed."""
        self._closed = False
        self._fleet_changed = asyncio.Event()

    async def start(self) -> None:
        """Start to connect; returns at once."""
        self._task = asyncio.create_task(self._run(), name=f"router-link {self._address}")

    @property
    def fleet(self) -> router_service_pb2.FleetState:
        return self._fleet

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def silent_seconds(self) -> float:
        """How long the router has sent nothing while it had requests to answer; 0 while it has none."""
        return time.monotonic() - self._heard_at if self._choices else 0.0

    async def wait_fleet_change(self) -> None:
        """Return after the next change of `fleet` (or of the connection)."""
        await self._fleet_changed.wait()

    def submit(self, request: LinkRequest, sink: Sink) -> int:
        if not self._connected or len(self._submits) >= MAX_PENDING_FRAME_PARTS:
            raise KvloomError(
                ErrorReason.ERROR_REASON_ROUTER_LOST, "The router cannot be reached.", retry_after_seconds=1.0
            )
        if not self._choices:
            self._heard_at = time.monotonic()
        handle, slots = self._choices.open(request, sink)
        self._submits.append((request, slots))
        self._wake_writer()
        return handle

    def cancel(self, handle: int) -> None:
        self._cancels += self._choices.cancel(handle)
        self._wake_writer()

    def discard(self, request_ids: Sequence[str]) -> None:
        if self._connected:
            self._discarded += request_ids
            self._wake_writer()

    async def moderate(self, request: router_service_pb2.ModerateRequest) -> router_service_pb2.ModerateResponse:
        try:
            stub = router_service_pb2_grpc.RouterServiceStub(self.channel_for_calls())
            return await stub.Moderate(request, timeout=MODERATE_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def charge_call(self, request: router_service_pb2.ChargeCallRequest) -> router_service_pb2.ChargeCallResponse:
        try:
            stub = router_service_pb2_grpc.RouterServiceStub(self.channel_for_calls())
            return await stub.ChargeCall(request, timeout=MODERATE_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def ask_all(self, method: str, request: Any) -> list[Any]:
        try:
            stub = overview_pb2_grpc.OverviewServiceStub(self.channel_for_calls())
            return [await getattr(stub, method)(request, timeout=MODERATE_TIMEOUT_SECONDS)]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def channel_for_calls(self) -> grpc.aio.Channel:
        """Their own, so that long texts do not delay the requests of the stream."""
        if self._call_channel is None:
            self._call_channel = self._open_channel(self._address)
        return self._call_channel

    def report_losses(self) -> None:
        """Send the losses that `identity` has not sent yet."""
        self._wake_writer()

    async def close(self) -> None:
        self._closed = True  # gRPC loses a cancellation that comes just as its call ends
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._drop_all("The connection to the router was closed.")
        channel, self._call_channel = self._call_channel, None
        if channel is not None:
            await channel.close()

    async def _run(self) -> None:
        while not self._closed:
            try:
                async with contextlib.AsyncExitStack() as channels:
                    await self._serve_one_connection(await self._open(channels))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
                self.refusal = error_from_peer(error) if isinstance(error, grpc.aio.AioRpcError) else None
                log.debug("The link to the router broke: %s", error)
            except WrongRouterError as error:
                log.warning("%s", error)
            except Exception:
                # E.g. a malformed frame. The link must survive it: a new connection starts from scratch.
                log.exception("The link to the router failed.")
            self._drop_all("The connection to the router was lost.")
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _open(self, channels: contextlib.AsyncExitStack) -> ConnectCall:
        """Wait for the router and connect: over a local socket if the router is on this machine, otherwise over gRPC.
        The gRPC channel is only made when it is needed, because its threads wake up several times a second."""
        local = await connect_local(self._address, router_service_pb2.RouterServiceConnectResponse)
        if local is not None:
            return local
        channel = self._open_channel(self._address)
        await channels.enter_async_context(channel)
        await channel.channel_ready()
        local = await connect_local(self._address, router_service_pb2.RouterServiceConnectResponse)
        return local or router_service_pb2_grpc.RouterServiceStub(channel).Connect(wait_for_ready=True)

    async def _serve_one_connection(self, call: ConnectCall) -> None:
        await call.write(router_service_pb2.RouterServiceConnectRequest(hello=self._hello()))
        self._writer = FrameWriter(call, self._take_frame)
        writer = asyncio.create_task(self._write_frames(self._writer, call), name="router-link writer")
        try:
            await deliver(call, router_service_pb2.RouterServiceConnectResponse, self._on_frame)
        finally:
            self._writer = None
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            call.cancel()

    def _hello(self) -> router_service_pb2.ClientHello:
        identity = self.identity
        return router_service_pb2.ClientHello(
            client_id=self._client_id, link_id=identity.link_id, lost=identity.all_losses()
        )

    async def _write_frames(self, writer: FrameWriter[Any], call: ConnectCall) -> None:
        try:
            await writer.run()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # the reader sees the same break and ends the connection

    def _wake_writer(self) -> None:
        if self._writer is not None:
            self._writer.wake()

    def _take_frame(self) -> router_service_pb2.RouterServiceConnectRequest | None:
        submits, self._submits = self._submits, []
        cancels, self._cancels = self._cancels, []
        losses = self.identity.take_unsent() if self._connected else []
        if not (submits or cancels or losses or self._discarded):
            return None
        if submits[1:] and (num_submits := _num_for_frame(submits)) < len(submits):
            submits, self._submits = submits[:num_submits], submits[num_submits:]
            cancels, self._cancels = [], cancels  # they must not overtake the rest
            self._wake_writer()
        frame = router_service_pb2.RouterServiceConnectRequest(cancel_slots=cancels, lost=losses)
        for request, slots in submits:
            _fill(frame.submits.add(), request, slots, self._fleet)
        if self._discarded and not self._submits:
            frame.discarded.extend(self._discarded)
            self._discarded.clear()
        return frame

    def _on_frame(self, frame: router_service_pb2.RouterServiceConnectResponse) -> None:
        self._heard_at = time.monotonic()
        if frame.HasField("fleet"):
            if not self._connected:
                self._check_incarnation(frame.incarnation_id)
            self._fleet = frame.fleet
            if not self._connected:
                self._connected, self.refusal = True, None
                self.owner_address = "" if frame.router_address == self._address else frame.router_address
                self.identity.note_hello_read()  # the first frame answers the hello
                self._wake_writer()
            self._signal_fleet_change()
        if frame.HasField("step"):
            self._on_step(frame.step)

    def _check_incarnation(self, incarnation_id: str) -> None:
        """Raises WrongRouterError. Another process may have taken a dead router's port, e.g. another fabric's router.
        Routers of an earlier version do not send their incarnation."""
        expected = self.expected_incarnation_id
        if expected and incarnation_id and incarnation_id != expected:
            raise WrongRouterError(f"Another router than the announced one listens at {self._address}.")

    def _on_step(self, step: generation_pb2.StepFrame) -> None:
        choices = self._choices
        for start in step.starts:
            choices.on_start(start.slot, start)
        if step.num_tokens or step.logprobs:
            logprobs: dict[int, list[generation_pb2.TokenLogprobs]] = {}
            for entry in step.logprobs:
                logprobs.setdefault(entry.slot, []).append(entry)
            choices.on_ragged_tokens(step.slots, step.num_tokens[:], step.token_ids[:], step.deltas, logprobs)
        else:
            choices.fast_path.on_tokens(step.slots[:], step.token_ids[:], step.deltas[:])
        for finish in step.finishes:
            if finish.slot in self._cancels:
                # It ended by itself. A cancel that is sent now would hit the next request on the slot.
                self._cancels.remove(finish.slot)
            choices.on_finish(finish)

    def _drop_all(self, message: str) -> None:
        """The connection is gone, and its slots with it: finish everything with ROUTER_LOST."""
        self._connected = False
        self._fleet = router_service_pb2.FleetState()
        self._submits.clear()
        self._cancels.clear()
        self._discarded.clear()
        error = KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, message, retry_after_seconds=1.0)
        self._choices.end_all(error.to_proto())
        if self.owner_address:
            self.identity.renew()
            self.owner_address = ""
        self._signal_fleet_change()

    def _signal_fleet_change(self) -> None:
        self._fleet_changed.set()
        self._fleet_changed = asyncio.Event()
        self._on_fleet_change()


def _num_for_frame(submits: Sequence[tuple[LinkRequest, Sequence[int]]]) -> int:
    """How many of the submits, of which there are some, go into the next frame."""
    num_bytes = 0
    for number, (request, _) in enumerate(submits, 1):
        num_bytes += BYTES_PER_TOKEN * len(request.prompt_token_ids)
        num_bytes += sum(image.ByteSize() for image in request.submit.request.images)
        if num_bytes >= MAX_FRAME_BYTES:
            return number
    return len(submits)


def _fill(
    submit: router_service_pb2.Submit,
    request: LinkRequest,
    slots: Sequence[int],
    fleet: router_service_pb2.FleetState,
) -> None:
    """Make the submit of a request for a router with this fleet."""
    submit.MergeFrom(request.submit)
    submit.choices.extend(_choices(request, slots))
    if fleet.reads_packed_token_ids:
        submit.packed_prompt_token_ids = pack_token_ids(request.prompt_token_ids)
    else:
        submit.prompt_token_ids.extend(request.prompt_token_ids)


def _choices(request: LinkRequest, slots: Sequence[int]) -> list[generation_pb2.Choice]:
    """The choices to submit, each with its own slot."""
    if not request.partial_choices:
        return [generation_pb2.Choice(slot=slot, index=index) for index, slot in enumerate(slots)]
    return [
        generation_pb2.Choice(
            slot=slot, index=choice.index, output_token_ids=choice.token_ids, num_delivered_chars=choice.num_chars
        )
        for slot, choice in zip(slots, request.partial_choices, strict=True)
    ]
