"""Several routers as one RouterLink: answers continue when a router is lost.

A new request goes to a connected router that is not draining (kvloom/router_link/members.py). When that router's
connection breaks, or its drain timeout ends, the request is sent to another router (or to the same one, when it is
back) and continues after the last token that its sink has received. Sinks notice nothing but the pause.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import grpc.aio

from kvloom.backoff import Backoff
from kvloom.errors import KvloomError
from kvloom.router_link.cancel_notifier import CancelNotifier
from kvloom.router_link.link import GrpcRouterLink, LinkRequest, Sink
from kvloom.router_link.members import CellOrder, NewLink, RouterMember, RouterMembers
from kvloom.router_link.tracked_request import LOSSES, Assignment, TrackedRequest
from kvloom.sampling import draw_seed
from kvloom.transport.channel_options import OpenChannel, open_plain_channel
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import (
    CancelRequest,
    ChargeCallRequest,
    ChargeCallResponse,
    FleetState,
    ModerateRequest,
    ModerateResponse,
)

log = logging.getLogger(__name__)

REATTACH_SECONDS: Final = 10.0
MAX_LOSSES: Final = 5
"""How many routers may be lost with a request. The request itself may be what crashes them."""
BATCH_REQUESTS: Final = 32
BATCH_SECONDS: Final = 0.03
"""At most this many requests are sent to other routers in this time, about 1,000 a second, so that a router that takes
over thousands continues to serve its own."""
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 1.0
REFUSED_CREDENTIALS: Final = frozenset(
    {ErrorReason.ERROR_REASON_UNAUTHENTICATED, ErrorReason.ERROR_REASON_PERMISSION_DENIED}
)
"""Why routers refuse a client that no other router accepts, and not a moment later either."""
AFFINITY_TOKENS: Final = 16
"""Requests that begin with the same block of tokens have affinity to the same router."""


class RouterGroup:
    """A RouterLink (kvloom/router_link/link.py) over all routers at `addresses`."""

    def __init__(
        self,
        client_id: str,
        addresses: Iterable[str] = (),
        *,
        reattach_seconds: float = REATTACH_SECONDS,
        tells_refusals: bool = False,
        new_link: NewLink = GrpcRouterLink,
        open_channel: OpenChannel = open_plain_channel,
    ) -> None:
        """`reattach_seconds`: how long a request that has lost its router looks for another one; 0: it fails at
        once. `tells_refusals`: callers learn why the routers refuse this process. Those of an edge do not, since it has
        credentials of its own."""
        self._members = RouterMembers(client_id, new_link, self._on_members_change, open_channel)
        self._cells: CellOrder | None = None
        self._routers: dict[str, str] = {}
        self._other_routers: dict[str, str] = {}
        """Those of other cells."""
        self._reattach_seconds = reattach_seconds
        self._tells_refusals = tells_refusals
        self._loop = asyncio.get_running_loop()
        self._random = random.Random()
        self._attached: dict[int, tuple[TrackedRequest, RouterMember]] = {}
        """By handle: requests that a router has."""
        self._parked: dict[int, TrackedRequest] = {}
        """By handle: requests that wait for a router."""
        self._due: list[tuple[float, int]] = []
        """Heap of (time of the next try, handle of a parked request). Handles of requests that are over are skipped."""
        self._backoff = Backoff(
            FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, jitter=lambda: self._random.uniform(0.2, 1.0)
        )
        """The jitter spreads out the many processes that lose the same router at the same time."""
        self._batch_room = BATCH_REQUESTS
        """How many requests this batch may still send."""
        self._batch_ends_at = 0.0
        self._handles = itertools.count(1)
        self._cancel_notifier = CancelNotifier(open_channel)
        """For routers that share an address, where the next connection may reach another router."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.num_reattached = 0
        """How often a router has taken over a request."""
        self.num_given_up = 0
        """How many requests no router took over."""
        self.set_routers(dict.fromkeys(addresses, ""))

    async def start(self) -> None:
        """Start to connect; returns at once."""
        await self._members.follow_wanted()
        self._task = asyncio.create_task(self._run(), name="router group")

    def set_routers(self, routers: Mapping[str, str]) -> None:
        """Replace the set of routers: by address, the incarnation that listens there ("": any). A router that is no
        longer in the set is dropped once its requests have ended."""
        self._routers = dict(routers)
        self._members.wanted = {**self._other_routers, **self._routers}
        self._wake.set()

    def use_cells(self, cells: CellOrder, routers: Mapping[str, str]) -> None:
        """Let other cells have requests, too, whose routers are these (as for `set_routers`)."""
        self._cells, self._other_routers = cells, dict(routers)
        self.set_routers(self._routers)

    @property
    def connected_links(self) -> dict[str, GrpcRouterLink]:
        """By address."""
        return self._members.connected_links

    @property
    def fleet(self) -> FleetState:
        return self._members.fleet

    @property
    def connected(self) -> bool:
        return self._members.connected

    @property
    def refusal(self) -> KvloomError | None:
        """Why no router accepts what this process calls itself, if its callers may know."""
        refusal = self._members.refusal if self._tells_refusals else None
        return refusal if refusal is not None and refusal.reason in REFUSED_CREDENTIALS else None

    def residency_refusal(self, tenant: str = "") -> KvloomError | None:
        """Why no router can have a request, if that is because not every cell may. `tenant`: whose it is, for a process
        that has requests of several. Another process learns it from the routers that refuse its own key."""
        if self._cells is not None and (refusal := self._cells.refusal(tenant)) is not None:
            return refusal
        refusal = self._members.refusal if self._tells_refusals else None
        is_residency = refusal is not None and refusal.reason == ErrorReason.ERROR_REASON_CELL_UNAVAILABLE
        return refusal if is_residency else None

    @property
    def addresses(self) -> list[str]:
        """The routers' addresses, with those first that accept requests."""
        return self._members.addresses()

    @property
    def num_parked(self) -> int:
        """How many requests wait for a router."""
        return len(self._parked)

    async def wait_fleet_change(self) -> None:
        """Return after the next change of `fleet` or `connected`."""
        await self._members.wait_change()

    def submit(self, request: LinkRequest, sink: Sink) -> int:
        """Submits as RouterLink does. A request with `partial_choices` that is not new is treated as one that has lost
        its router: it is sent as soon as a router has its model."""
        give_seed(request)
        tracked = TrackedRequest(next(self._handles), request, sink, self, _affinity_key(request))
        if request.partial_choices and not request.is_new:
            self._park(tracked)
            return tracked.handle
        member = self._pick(tracked)
        if member is None:
            raise self.residency_refusal(request.submit.tenant) or self.refusal or self._members.unavailable_error()
        self._attach(tracked, member)
        return tracked.handle

    def cancel(self, handle: int) -> None:
        tracked = self._parked.pop(handle, None)
        attached = self._attached.pop(handle, None)
        if attached is not None:
            tracked, member = attached
            member.link.cancel(member.handles.pop(handle))
        if tracked is not None:
            tracked.is_over = True

    def discard(self, request_ids: Sequence[str]) -> None:
        """Discards as RouterLink does. All routers are told, because any may have had a part of the answers."""
        self._members.discard(request_ids)

    async def moderate(self, request: ModerateRequest) -> ModerateResponse:
        """Moderates as RouterLink does: any router can answer, because all use the same safety service."""
        return await self._any_link().moderate(request)

    async def charge_call(self, request: ChargeCallRequest) -> ChargeCallResponse:
        """Charges as RouterLink does: any router can answer, because all share the limits."""
        return await self._any_link().charge_call(request)

    def _any_link(self) -> GrpcRouterLink:
        """A link for a call that any router of the own cell can answer. Another cell gets none, since such a call does
        not say which cells may have its texts. Raises KvloomError."""
        available = self._members.available
        if self._cells is not None:
            available = [member for member in available if member.address not in self._other_routers]
        if not available:
            raise self.refusal or self._members.unavailable_error()
        return self._random.choice(available).link

    async def ask_all(self, method: str, request: Any) -> list[Any]:
        """Asks as RouterLink does."""
        links = self._members.connected_links.values()
        if not links:
            raise self.refusal or self._members.unavailable_error()
        answers = await asyncio.gather(*(link.ask_all(method, request) for link in links), return_exceptions=True)
        found = [answer for answered in answers if not isinstance(answered, BaseException) for answer in answered]
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if not found:
            raise failures[0]
        return found

    def channel_to(self, model: str) -> grpc.aio.Channel:
        """A channel for calls to a router that has shards of this model, if one has. Raises KvloomError."""
        member = self._members.pick(model, b"")
        if member is None:
            raise self.refusal or self._members.unavailable_error()
        return member.link.channel_for_calls()

    def link_ids(self) -> list[str]:
        """The ids by which routers know this client's links."""
        return self._members.link_ids()

    def assignments(self, handle: int) -> Sequence[Assignment]:
        """The links over which a request was sent; the list may still grow. Empty when the request is over."""
        tracked = self._parked.get(handle)
        if tracked is None and handle in self._attached:
            tracked = self._attached[handle][0]
        return () if tracked is None else tracked.assignments

    def note_delegated_loss(self, link_id: str, request_id: str, num_tokens: int) -> None:
        """Report a loss on behalf of a process that is dead, or whose answer was taken over: of a request that its link
        `link_id` had, `num_tokens` tokens have been delivered. The router credits what it has metered beyond that, and
        ends the request."""
        self._members.note_delegated_loss(link_id, request_id, num_tokens)

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        error = KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, "The connection to the routers was closed.")
        for tracked in list(self._parked.values()):
            self._fail(tracked, error)
        await self._members.close()
        await self._cancel_notifier.close()

    def _on_members_change(self) -> None:
        self._wake.set()

    # -- tracked requests ---------------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._loop.time()

    def on_lost(self, tracked: TrackedRequest) -> None:
        attached = self._attached.get(tracked.handle)
        if attached is not None and tracked.error.reason == ErrorReason.ERROR_REASON_ROUTER_LOST:
            self._report_loss(attached[1].link, tracked.request.wanted.request_id, tracked.num_assignment_tokens)
        self._detach(tracked)
        error = self.refusal or KvloomError.from_proto(tracked.error)
        if error.reason in REFUSED_CREDENTIALS or self._closed or not self._reattach_seconds:
            tracked.fail(error)
        elif tracked.num_losses > MAX_LOSSES:
            self.num_given_up += 1
            tracked.fail(error)
        else:
            self._park(tracked)

    def _report_loss(self, link: GrpcRouterLink, request_id: str, num_tokens: int) -> None:
        """The link's next connection reports the loss. If that connection may reach another router, the loss is also
        sent to the lost router's own address."""
        link.identity.note_lost(request_id, num_tokens)
        if link.owner_address and not self._closed:
            link_id = link.identity.link_id
            settlement = CancelRequest(request_id=request_id, link_id=link_id, num_received_tokens=num_tokens)
            self._cancel_notifier.add(link.owner_address, settlement)

    def on_over(self, tracked: TrackedRequest) -> None:
        tracked.is_over = True
        self._detach(tracked)
        self._parked.pop(tracked.handle, None)

    def _attach(self, tracked: TrackedRequest, member: RouterMember) -> None:
        """Raises KvloomError when the link does not accept the request."""
        handle = member.link.submit(tracked.next_request(), tracked)
        member.handles[tracked.handle] = handle
        self._attached[tracked.handle] = (tracked, member)
        tracked.on_submitted(member.link.identity.link_id)
        if self._cells is not None:
            self._cells.note_sent(tracked.request, member.address)

    def _detach(self, tracked: TrackedRequest) -> None:
        attached = self._attached.pop(tracked.handle, None)
        if attached is not None:
            attached[1].handles.pop(tracked.handle, None)

    def _park(self, tracked: TrackedRequest) -> None:
        self._parked[tracked.handle] = tracked
        pause_seconds = self._backoff.delay_seconds(tracked.num_refusals)
        heapq.heappush(self._due, (self.now() + pause_seconds, tracked.handle))
        self._wake.set()

    def _pick(self, tracked: TrackedRequest) -> RouterMember | None:
        if self._cells is None:
            return self._members.pick(tracked.request.wanted.model, tracked.affinity_key)
        return self._members.pick_in(self._cells, tracked.request, tracked.affinity_key)

    # -- finding another router ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._members.follow_wanted()
                delay_seconds = self._reattach_due()
            except Exception:
                log.exception("Reconnecting to the routers, or moving requests between them, failed.")
                delay_seconds = LONGEST_PAUSE_SECONDS
            try:
                async with asyncio.timeout(delay_seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _reattach_due(self) -> float | None:
        """Try the parked requests that are due, at most a batch. Returns in how many seconds it must be called again at
        the latest; None: not before something has changed."""
        now = self.now()
        if now >= self._batch_ends_at:
            self._batch_ends_at = now + BATCH_SECONDS * self._random.uniform(0.8, 1.2)
            self._batch_room = BATCH_REQUESTS
        while self._due and self._due[0][0] <= now:
            if not self._batch_room:
                return self._batch_ends_at - now
            _, handle = heapq.heappop(self._due)
            tracked = self._parked.get(handle)
            if tracked is not None:
                self._batch_room -= self._reattach(tracked, now)
        return self._due[0][0] - now if self._due else None

    def _reattach(self, tracked: TrackedRequest, now: float) -> bool:
        """Returns whether the request was sent to a router."""
        lost_at = tracked.lost_at
        assert lost_at is not None
        member = self._pick(tracked)
        if member is not None and tracked.request.wanted.model in member.ready_models:
            del self._parked[tracked.handle]
            try:
                self._attach(tracked, member)
            except KvloomError as error:
                if error.reason != ErrorReason.ERROR_REASON_ROUTER_LOST:
                    self._fail(tracked, error)
                    return True
                self._parked[tracked.handle] = tracked
            else:
                self.num_reattached += 1
                return True
        if (refusal := self.refusal) is not None:
            self._fail(tracked, refusal)
            return False
        gives_up_at = lost_at + self._reattach_seconds
        if now >= gives_up_at:
            self.num_given_up += 1
            self._fail(tracked, self._not_reattached_error(tracked))
        else:
            pause_seconds = self._random.uniform(0.5, 1.0) * LONGEST_PAUSE_SECONDS / 4
            heapq.heappush(self._due, (min(now + pause_seconds, gives_up_at), tracked.handle))
        return False

    def _fail(self, tracked: TrackedRequest, error: KvloomError) -> None:
        try:
            tracked.fail(error)
        except Exception:
            log.exception("A sink raised when its request ended.")

    def _not_reattached_error(self, tracked: TrackedRequest) -> KvloomError:
        """The last rejection if a router has rejected the request, otherwise that its router was lost."""
        if tracked.error.reason not in LOSSES:
            return KvloomError.from_proto(tracked.error)
        if (refusal := self.residency_refusal(tracked.request.submit.tenant)) is not None:
            return refusal
        message = f"The router was lost, and no other one took over within {self._reattach_seconds:g} seconds."
        return KvloomError(ErrorReason.ERROR_REASON_ROUTER_LOST, message, retry_after_seconds=1.0)


def give_seed(request: LinkRequest) -> None:
    """Draw the request's seed if it has none. Otherwise each router would draw its own, but all of them must use the
    same one."""
    wanted = request.wanted
    if not wanted.sampling.HasField("seed"):
        wanted.sampling.seed, wanted.seed_is_drawn = draw_seed(), True


def _affinity_key(request: LinkRequest) -> bytes:
    """Requests with the same key should go to the same router; b"": the request has no such key."""
    session_key = request.wanted.session_key
    if session_key:
        return session_key.encode()
    first_block = request.prompt_token_ids[:AFFINITY_TOKENS]
    return array("I", first_block).tobytes() if len(first_block) == AFFINITY_TOKENS else b""
