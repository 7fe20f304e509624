"""A link to the router for an edge in the same process: nothing is encoded, copied or queued between the two.

Steps that the core sends to this client reach the sinks directly, within the event that produced them. Requests and
cancels reach the core on the next turn of the event loop, all of one turn together. A sink may therefore call `submit`
and `cancel`, and it is never called before `submit` has returned.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import structlog

from kvloom.errors import KvloomError
from kvloom.router_link.open_choices import OpenChoices, Sink
from kvloom.router_link.request import LinkRequest
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR, TokenLogprobs
from kvloom.v1.router_service_pb2 import (
    ChargeCallRequest,
    ChargeCallResponse,
    FleetState,
    ModerateRequest,
    ModerateResponse,
)
from kvloom_common.process.request_context import request_fields
from router import convert
from router.core.actions import FleetChanged
from router.core.events import ChoiceSpec, ClientGone, Request, RequestArrived, SlotsCancelled
from router.core.frames import Finish, Step
from router.core_driver import CoreDriver
from router.links.safety_link import ModerationLink
from router.overview.overview import Overview
from router.request_validator import RequestValidator
from router.side_call_desk import SideCallDesk

log = structlog.get_logger()

_numbers = itertools.count(1)


class LocalRouterLink:
    """Both a RouterLink (kvloom/router_link/link.py) and a client of the core (router/core_driver.py)."""

    def __init__(
        self,
        driver: CoreDriver,
        intake: RequestValidator,
        name: str,
        moderation: ModerationLink | None = None,
        side_calls: SideCallDesk | None = None,
        overview: Overview | None = None,
    ) -> None:
        self._overview = overview
        self._side_calls = side_calls or SideCallDesk(driver, has_limits=False)
        self._moderation = moderation or ModerationLink(None)
        self._driver = driver
        self._intake = intake
        self._client_id = f"{name}#local-{next(_numbers)}"
        self._connected = False
        self._fleet = FleetState()
        self._fleet_changed = asyncio.Event()
        self._choices = OpenChoices(self.cancel)
        self._arrived: list[Request] = []
        self._refused: list[Finish] = []
        self._cancelled: list[int] = []
        self._discarded: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._flush: asyncio.Handle | None = None

    @property
    def client_id(self) -> str:
        """The core's id for this link."""
        return self._client_id

    async def start(self) -> None:
        self._driver.add_client(self._client_id, self)
        self._connected = True
        self.send_fleet(self._driver.core.fleet)

    async def close(self) -> None:
        """Ends the requests that still run with ROUTER_LOST. Calling this again has no effect."""
        if not self._connected:
            return
        self._connected = False
        if self._flush is not None:
            self._flush.cancel()
        self._driver.remove_client(self._client_id)
        self._driver.dispatch(ClientGone(self._client_id))
        message = "The connection to the router was closed."
        error = KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, message, retry_after_seconds=1.0)
        self._choices.end_all(error.to_proto())
        self._fleet = FleetState()
        self._notify_fleet_changed()

    # -- RouterLink ---------------------------------------------------------------------------------------------------

    @property
    def fleet(self) -> FleetState:
        return self._fleet

    @property
    def connected(self) -> bool:
        return self._connected

    async def wait_fleet_change(self) -> None:
        """Returns after the next change of `fleet` or of the connection."""
        await self._fleet_changed.wait()

    def submit(self, request: LinkRequest, sink: Sink) -> int:
        if not self._connected:
            message = "The router has stopped."
            raise KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, message, retry_after_seconds=1.0)
        handle, slots = self._choices.open(request, sink)
        try:
            self._arrived.append(self._intake.request_from_link(request, _choices(request, slots), self._client_id))
        except KvloomError as error:
            self._driver.request_refused(error)
            self._refused += [Finish(slot, FINISH_REASON_ERROR, error=error) for slot in slots]
        self._flush_soon()
        return handle

    def cancel(self, handle: int) -> None:
        slots = self._choices.cancel(handle)
        if slots:
            self._cancelled += slots
            self._flush_soon()

    def discard(self, request_ids: Sequence[str]) -> None:
        self._discarded += request_ids
        self._flush_soon()

    async def moderate(self, request: ModerateRequest) -> ModerateResponse:
        return await self._moderation.moderate(request)

    async def charge_call(self, request: ChargeCallRequest) -> ChargeCallResponse:
        return await self._side_calls.serve(request)

    async def ask_all(self, method: str, request: Any) -> list[Any]:
        assert self._overview is not None, "tests of requests alone have none"
        calls = {
            "GetOverview": self._overview.get_overview,
            "ExplainRequest": self._overview.explain_request,
        }
        return [await calls[method](request)]

    def _flush_soon(self) -> None:
        if self._flush is None:
            self._flush = self._loop.call_soon(self._on_flush)

    def _on_flush(self) -> None:
        self._flush = None
        arrived, self._arrived = self._arrived, []
        refused, self._refused = self._refused, []
        cancelled, self._cancelled = self._cancelled, []
        discarded, self._discarded = self._discarded, []
        for request in arrived:
            try:
                self._driver.dispatch(RequestArrived(request))
            except Exception:
                names = request_fields(
                    request.request_id, request.client_request_id, request.traceparent, request.tenant
                )
                log.exception("core_request_failed", **names)
                self._fail(request)
        for finish in refused:
            self._choices.on_finish(convert.finish_to_proto(finish))
        # A sequence that has ended meanwhile has released its slot, which a request of this turn may have taken.
        slots = [slot for slot in cancelled if self._choices.is_cancelled(slot)]
        if slots:
            try:
                self._driver.dispatch(SlotsCancelled(self._client_id, slots))
            except Exception:
                log.exception("core_cancel_failed")
        if discarded:
            self._driver.answers_discarded(self._client_id, discarded)

    def _fail(self, request: Request) -> None:
        error = KvloomError(ErrorReason.ERROR_REASON_INTERNAL, "The router failed on this request.")
        for choice in request.choices:
            self._choices.on_finish(convert.finish_to_proto(Finish(choice.slot, FINISH_REASON_ERROR, error=error)))

    # -- ClientSink ---------------------------------------------------------------------------------------------------

    def send_fleet(self, fleet: FleetChanged) -> None:
        self._fleet = convert.fleet_to_proto(fleet)
        self._notify_fleet_changed()

    def send_step(self, step: Step) -> None:
        """This is the hot path: it makes one call per token."""
        choices = self._choices
        for start in step.starts:
            choices.on_start(start.slot, convert.start_to_proto(start))
        if step.num_tokens or step.logprobs:
            logprobs: dict[int, list[TokenLogprobs]] = {}
            for slot, entry in step.logprobs:
                logprobs.setdefault(slot, []).append(convert.logprobs_to_proto(slot, entry))
            choices.on_ragged_tokens(step.slots, step.num_tokens, step.token_ids, step.deltas, logprobs)
        else:
            choices.fast_path.on_tokens(step.slots, step.token_ids, step.deltas)
        for finish in step.finishes:
            choices.on_finish(convert.finish_to_proto(finish))

    def _notify_fleet_changed(self) -> None:
        self._fleet_changed.set()
        self._fleet_changed = asyncio.Event()


def _choices(request: LinkRequest, slots: Sequence[int]) -> tuple[ChoiceSpec, ...]:
    """Returns the request's choices as the core expects them, each with a slot of its own."""
    if not request.partial_choices:
        return tuple(ChoiceSpec(slot=slot, index=index) for index, slot in enumerate(slots))
    return tuple(
        ChoiceSpec(slot, choice.index, choice.token_ids.tolist(), choice.num_chars)
        for slot, choice in zip(slots, request.partial_choices, strict=True)
    )
