"""A way to the router for the process that it runs in: nothing is encoded, copied or queued between the two.

What the core sends to this client goes straight on to the sinks, within the event that made it. Requests and cancels
reach the core on the next turn of the event loop, all of a turn together, so that a sink may call `submit` and `cancel`
and never hears anything before `submit` has returned.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Final

import structlog

from kvloom.errors import KvloomError
from kvloom.link_flows import LinkFlows, OpenChoice
from kvloom.router_link import LinkRequest, Sink
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, TokenLogprobs
from kvloom.v1.router_service_pb2 import FleetState
from router import convert
from router.core.actions import FleetChanged
from router.core.events import ChoiceSpec, ClientGone, Request, RequestArrived, SlotsCancelled
from router.core.frames import Finish, Start, Step
from router.dispatcher import Dispatcher
from router.intake import Intake

log = structlog.get_logger()

_NO_LOGPROBS: Final = ()
_numbers = itertools.count(1)


class LocalRouterLink:
    """A RouterLink (kvloom/router_link.py), and the core's client (router/dispatcher.py) at the same time."""

    def __init__(self, dispatcher: Dispatcher, intake: Intake, name: str) -> None:
        self._dispatcher = dispatcher
        self._intake = intake
        self._client_id = f"{name}#local-{next(_numbers)}"
        self._connected = False
        self._fleet = FleetState()
        self._fleet_changed = asyncio.Event()
        self._by_slot: dict[int, OpenChoice] = {}
        self._flows = LinkFlows(self._by_slot, self._give_up_sink)
        self._slots_by_handle: dict[int, list[int]] = {}
        self._free_slots: list[int] = []
        self._next_slot = 0
        self._handles = itertools.count(1)
        self._arrived: list[Request] = []
        self._refused: list[Finish] = []
        self._cancelled: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._flush: asyncio.Handle | None = None

    async def start(self) -> None:
        """Connect."""
        self._dispatcher.add_client(self._client_id, self)
        self._connected = True
        self.send_fleet(self._dispatcher.core.fleet)

    async def close(self) -> None:
        """Repeatable. What still runs finishes with ROUTER_LOST."""
        if not self._connected:
            return
        self._connected = False
        if self._flush is not None:
            self._flush.cancel()
        self._dispatcher.remove_client(self._client_id)
        self._dispatcher.dispatch(ClientGone(self._client_id))
        message = "The connection to the router was closed."
        error = KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, message, retry_after_seconds=1.0)
        for slot in list(self._by_slot):
            self._on_finish(Finish(slot, FINISH_REASON_ERROR, error=error))
        self._fleet = FleetState()
        self._tell_fleet_changed()

    # -- RouterLink ---------------------------------------------------------------------------------------------------

    @property
    def fleet(self) -> FleetState:
        return self._fleet

    @property
    def connected(self) -> bool:
        return self._connected

    async def wait_fleet_change(self) -> None:
        """Return after the next change of `fleet` (or of the connection)."""
        await self._fleet_changed.wait()

    def submit(self, request: LinkRequest, sink: Sink) -> int:
        if not self._connected:
            message = "The router has stopped."
            raise KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, message, retry_after_seconds=1.0)
        handle = next(self._handles)
        choices = self._choices(request)
        slots = [choice.slot for choice in choices]
        for choice in choices:
            self._by_slot[choice.slot] = OpenChoice(handle, choice.index, sink)
        self._slots_by_handle[handle] = slots
        try:
            self._arrived.append(self._intake.request_from_link(request, choices, self._client_id))
        except KvloomError as error:
            self._dispatcher.refused(error)
            self._refused += [Finish(slot, FINISH_REASON_ERROR, error=error) for slot in slots]
        self._flush_soon()
        return handle

    def cancel(self, handle: int) -> None:
        slots = self._slots_by_handle.pop(handle, ())
        for slot in slots:
            self._flows.end(slot)
            self._by_slot[slot].sink = None
        if slots:
            self._cancelled += slots
            self._flush_soon()

    def _choices(self, request: LinkRequest) -> tuple[ChoiceSpec, ...]:
        """On slots of their own."""
        if not request.begun:
            return tuple(ChoiceSpec(slot=self._take_slot(), index=index) for index in range(request.n))
        return tuple(
            ChoiceSpec(self._take_slot(), choice.index, choice.token_ids.tolist(), choice.num_chars)
            for choice in request.begun
        )

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._next_slot += 1
        return self._next_slot

    def _flush_soon(self) -> None:
        if self._flush is None:
            self._flush = self._loop.call_soon(self._on_flush)

    def _on_flush(self) -> None:
        self._flush = None
        arrived, self._arrived = self._arrived, []
        refused, self._refused = self._refused, []
        cancelled, self._cancelled = self._cancelled, []
        for request in arrived:
            try:
                self._dispatcher.dispatch(RequestArrived(request))
            except Exception:
                log.exception("the core failed on a request", request_id=request.request_id)
                self._fail(request)
        for finish in refused:
            self._on_finish(finish)
        # One that ended meanwhile has given up its slot, and a request of this turn may have taken it.
        slots = [slot for slot in cancelled if slot in self._by_slot and self._by_slot[slot].sink is None]
        if slots:
            try:
                self._dispatcher.dispatch(SlotsCancelled(self._client_id, slots))
            except Exception:
                log.exception("the core failed on a cancel")

    def _fail(self, request: Request) -> None:
        error = KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The router failed on this request.")
        for choice in request.choices:
            self._on_finish(Finish(choice.slot, FINISH_REASON_ERROR, error=error))

    # -- ClientPeer ---------------------------------------------------------------------------------------------------

    def send_fleet(self, fleet: FleetChanged) -> None:
        self._fleet = convert.fleet_to_proto(fleet)
        self._tell_fleet_changed()

    def send_step(self, step: Step) -> None:
        """The hot path: one call a token."""
        for start in step.starts:
            self._on_start(start)
        if step.num_tokens or step.logprobs:
            self._on_ragged_tokens(step)
        else:
            self._flows.on_tokens(step.slots, step.token_ids, step.deltas)
        for finish in step.finishes:
            self._on_finish(finish)

    def _on_start(self, start: Start) -> None:
        choice = self._by_slot[start.slot]
        if choice.sink is not None:
            try:
                choice.sink.on_start(choice.index, convert.start_to_proto(start))
            except Exception:
                self._give_up_sink(choice)

    def _on_ragged_tokens(self, step: Step) -> None:
        """Any number of tokens an entry, logprobs."""
        self._flows.tell()
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for slot, entry in step.logprobs:
            logprobs.setdefault(slot, []).append(convert.logprobs_to_proto(slot, entry))
        counts: Sequence[int] = step.num_tokens or [1] * len(step.slots)
        position = 0
        for slot, count, delta in zip(step.slots, counts, step.deltas, strict=True):
            token_ids = step.token_ids[position : position + count]
            position += count
            choice = self._by_slot[slot]
            if choice.sink is not None:
                try:
                    choice.sink.on_tokens(choice.index, delta, token_ids, logprobs.get(slot, _NO_LOGPROBS))
                except Exception:
                    self._give_up_sink(choice)

    def _on_finish(self, finish: Finish) -> None:
        choice = self._by_slot.get(finish.slot)
        if choice is None:
            return
        self._flows.end(finish.slot)
        del self._by_slot[finish.slot]
        self._free_slots.append(finish.slot)
        slots = self._slots_by_handle.get(choice.handle)
        if slots is not None:
            slots.remove(finish.slot)
            if not slots:
                del self._slots_by_handle[choice.handle]
        if choice.sink is not None:
            try:
                choice.sink.on_finish(choice.index, convert.finish_to_proto(finish))
            except Exception:
                self._give_up_sink(choice)

    def _give_up_sink(self, choice: OpenChoice) -> None:
        """A sink raised: its request ends, the others go on."""
        log.exception("a sink failed; its request is cancelled")
        self.cancel(choice.handle)

    def _tell_fleet_changed(self) -> None:
        self._fleet_changed.set()
        self._fleet_changed = asyncio.Event()
