"""The routers that a process knows: one link to each, and what they can serve together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import xxhash

from kvloom.adapters import adapter_names
from kvloom.errors import KvloomError
from kvloom.router_link.identity import MAX_DELEGATED_LOSSES, LinkIdentity, note_bounded
from kvloom.router_link.link import GrpcRouterLink, LinkRequest
from kvloom.transport.channel_options import OpenChannel
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo

MAX_ROUTERS: Final = 256
MAX_IDENTITIES: Final = 4 * MAX_ROUTERS

NewLink = Callable[[str, str, Callable[[], None], OpenChannel], GrpcRouterLink]
"""Makes a link from an address, the client id, a function to call when the fleet or the connection has changed, and one
that opens channels."""


class CellOrder(Protocol):
    """Chooses among cells, each of which has some of the routers (docs/operate/regions.md)."""

    def cell_of(self, address: str) -> str:
        """Returns the cell of a router."""
        ...

    def order(self, request: LinkRequest) -> Sequence[str]:
        """Returns the cells that may have the request, the best first."""
        ...

    def note_sent(self, request: LinkRequest, address: str) -> None:
        """Called when the router at the address has got the request."""
        ...

    def refusal(self, tenant: str) -> KvloomError | None:
        """Returns why no router can have a request of the tenant, if that is because not every cell may."""
        ...


class NearCellFirst:
    """A CellOrder for a client that knows of its routers only which are those of other cells: these have its requests
    while no other router can take them. It is told of no residency: routers refuse whom their cell may not serve."""

    def __init__(self, far_addresses: Iterable[str]) -> None:
        self._far_addresses = frozenset(far_addresses)

    def cell_of(self, address: str) -> str:
        return "far" if address in self._far_addresses else "near"

    def order(self, request: LinkRequest) -> Sequence[str]:  # noqa: ARG002  (a CellOrder)
        return ("near", "far")

    def note_sent(self, request: LinkRequest, address: str) -> None:
        """Nothing depends on what was sent."""

    def refusal(self, tenant: str) -> KvloomError | None:  # noqa: ARG002  (a CellOrder)
        return None


class RouterMember:
    """One router, and the link to it."""

    __slots__ = ("address", "handles", "link", "ready_models", "salt")

    def __init__(self, address: str, link: GrpcRouterLink) -> None:
        self.address = address
        self.salt = salt_of(address)
        self.link = link
        self.ready_models: frozenset[str] = frozenset()
        self.handles: dict[int, int] = {}
        """The requests that this router has: the link's handles, by the group's."""


class RouterMembers:
    """The routers at the addresses in `wanted`, each with a link that reconnects by itself."""

    def __init__(
        self, client_id: str, new_link: NewLink, on_change: Callable[[], None], open_channel: OpenChannel
    ) -> None:
        """`on_change` is called whenever something that is public here has changed."""
        self.wanted: dict[str, str] = {}
        """By address: the incarnation that listens there; "": any."""
        self.fleet = FleetState()
        """The models that all of them together can serve; empty while none is connected."""
        self.connected = False
        self.available: list[RouterMember] = []
        """The routers that are connected and not draining."""
        self._client_id = client_id
        self._new_link = new_link
        self._open_channel = open_channel
        self._on_change = on_change
        self._members: dict[str, RouterMember] = {}
        self._identities: dict[str, LinkIdentity] = {}
        """By address, including those of former routers: one that hangs expires in Redis, and may come back."""
        self._delegated_losses: dict[tuple[str, str], int] = {}
        """The lost requests, as in LinkIdentity, of routers that are not known yet."""
        self._changed = asyncio.Event()

    async def follow_wanted(self) -> None:
        """Connect to new routers. Those that are no longer wanted are dropped when their requests have ended."""
        for address, incarnation_id in itertools.islice(self.wanted.items(), MAX_ROUTERS):
            if address in self._members:
                self._members[address].link.expected_incarnation_id = incarnation_id
                continue
            link = self._new_link(address, self._client_id, self._refresh, self._open_channel)
            link.identity = self._identity(address)
            link.expected_incarnation_id = incarnation_id
            self._members[address] = RouterMember(address, link)
            await link.start()
        for address, member in list(self._members.items()):
            if address not in self.wanted and not self._is_needed(member):
                del self._members[address]
                self._refresh()
                await member.link.close()

    def _identity(self, address: str) -> LinkIdentity:
        identity = self._identities.get(address)
        if identity is None:
            identity = self._identities[address] = LinkIdentity()
            identity.delegated_losses = dict(self._delegated_losses)
        while len(self._identities) > MAX_IDENTITIES:
            del self._identities[next(iter(self._identities))]
        return identity

    def link_ids(self) -> list[str]:
        return [identity.link_id for identity in self._identities.values()]

    def note_delegated_loss(self, link_id: str, request_id: str, num_tokens: int) -> None:
        """Report the loss to all routers. Which one had the request is not known, and the others ignore the report."""
        note_bounded(self._delegated_losses, (link_id, request_id), num_tokens, MAX_DELEGATED_LOSSES)
        for address, identity in self._identities.items():
            identity.note_delegated_loss(link_id, request_id, num_tokens)
            if address in self._members:
                self._members[address].link.report_losses()

    def discard(self, request_ids: Sequence[str]) -> None:
        for member in self._members.values():
            member.link.discard(request_ids)

    def _is_needed(self, member: RouterMember) -> bool:
        """True when a router that is no longer wanted must be kept: it has requests, or no successor is connected."""
        has_successor = any(self._members[a].link.connected for a in self.wanted if a in self._members)
        return member.link.connected and (bool(member.handles) or not has_successor)

    async def close(self) -> None:
        members, self._members = self._members, {}
        for member in members.values():
            await member.link.close()
        self._refresh()

    async def wait_change(self) -> None:
        """Return after the next change."""
        await self._changed.wait()

    def addresses(self) -> list[str]:
        """The available routers' addresses, then those of the other connected ones, then the rest."""
        connected = [member.address for member in self._members.values() if member.link.connected]
        return list(dict.fromkeys([*(member.address for member in self.available), *connected, *self.wanted]))

    @property
    def connected_links(self) -> dict[str, GrpcRouterLink]:
        """By address."""
        return {member.address: member.link for member in self._members.values() if member.link.connected}

    def pick(self, model: str, affinity_key: bytes) -> RouterMember | None:
        """The router for a request; None when none is available."""
        available = self.available
        if len(available) < 2:
            return available[0] if available else None
        picked = pick_router([_view(member, model) for member in available], affinity_key)
        return None if picked is None else self._members[picked.address]

    def pick_in(self, cells: CellOrder, request: LinkRequest, affinity_key: bytes) -> RouterMember | None:
        """The router for a request, of the first cell that has a healthy one with shards for it, or else of any cell
        that may have it; None when none is available."""
        by_cell: dict[str, list[RouterView]] = {cell: [] for cell in cells.order(request)}
        for member in self.available:
            views = by_cell.get(cells.cell_of(member.address))
            if views is not None:
                views.append(_view(member, request.wanted.model))
        usable = (views for views in by_cell.values() if any(view.is_usable for view in views))
        picked = pick_router(next(usable, list(itertools.chain(*by_cell.values()))), affinity_key)
        return None if picked is None else self._members[picked.address]

    def unavailable_error(self) -> KvloomError:
        """Why no router is available."""
        if self.connected:
            reason, message = ErrorReason.ERROR_REASON_DRAINING, "The router is stopping and takes no new requests."
        else:
            reason, message = ErrorReason.ERROR_REASON_ROUTER_LOST, "The router cannot be reached."
        return KvloomError(reason, message, retry_after_seconds=1.0)

    @property
    def refusal(self) -> KvloomError | None:
        """Why a router refuses this process; None while one does not."""
        if self.connected:
            return None
        return next((one.link.refusal for one in self._members.values() if one.link.refusal is not None), None)

    def _refresh(self) -> None:
        connected = [member for member in self._members.values() if member.link.connected]
        for member in connected:
            models = member.link.fleet.models
            member.ready_models = ready_names(models)
        self.connected = bool(connected)
        available = [member for member in connected if not member.link.fleet.draining]
        self.available = [member for member in available if member.address in self.wanted] or available
        self.fleet = merged_fleet([member.link.fleet for member in self.available or connected])
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()


def ready_names(models: Iterable[ModelInfo]) -> frozenset[str]:
    """The models, alone and with adapters, that have shards which accept requests."""
    names = [model.name for model in models if model.num_ready_shards]
    adapters = {model.name: [one.name for one in model.adapters if one.num_ready_shards] for model in models}
    return frozenset((*names, *adapter_names(adapters)))


def merged_fleet(fleets: Iterable[FleetState]) -> FleetState:
    """One state from those of several routers. All of them watch the same shards, so for each model the state of the
    router with the most ready shards is taken. A model is withdrawn as soon as one of them knows it."""
    best: dict[str, ModelInfo] = {}
    withdrawn: set[str] = set()
    draining = False
    for fleet in fleets:
        draining = fleet.draining
        for model in fleet.models:
            if model.withdrawn:
                withdrawn.add(model.name)
            if model.name not in best or model.num_ready_shards > best[model.name].num_ready_shards:
                best[model.name] = model
    merged = FleetState(models=best.values(), draining=draining)
    for model in merged.models:
        model.withdrawn = model.name in withdrawn
    return merged


SPREAD: Final = 1.25
"""A router with more than this many times its fair share of requests in flight gets none for the sake of affinity."""
SLACK_REQUESTS: Final = 8
"""How many requests it may have beyond that, so that a small number of requests stays together."""
MAX_SILENT_SECONDS: Final = 1.5
"""A router that has owed a response for longer may hang: it gets no new requests while another one is healthy. If it
only computes a long prompt, little is lost."""


class RouterView(NamedTuple):
    """A router that is connected and not draining."""

    address: str
    salt: int
    """The hash of the address (`salt_of`)."""
    is_ready: bool
    """True when the router knows a ready shard for the request's model."""
    num_in_flight: int
    """How many of this process's requests it has."""
    silent_seconds: float = 0.0
    """The time since its last frame, or since it got a request to answer if that is later; 0 while it has none."""

    @property
    def is_usable(self) -> bool:
        """True when it is the right one for a new request as far as is known."""
        return self.is_ready and self.silent_seconds <= MAX_SILENT_SECONDS


def _view(member: RouterMember, model: str) -> RouterView:
    is_ready = model in member.ready_models
    return RouterView(member.address, member.salt, is_ready, len(member.handles), member.link.silent_seconds)


def salt_of(address: str) -> int:
    """The hash of a router's address, as pick_router uses it."""
    return xxhash.xxh3_64_intdigest(address.encode())


def pick_router(routers: Sequence[RouterView], affinity_key: bytes) -> RouterView | None:
    """The router for a request; None when `routers` is empty.

    Requests of one key go to one router, so that it knows what it has just placed, and each tenant waits in one queue.
    When a router is added or removed, only its keys move: rendezvous hashing (Thaler & Ravishankar, 1998) with bounded
    loads (Mirrokni et al., 2018). Without a key (b""), the router with the fewest requests in flight is picked.
    """
    ready = [router for router in routers if router.is_ready] or routers
    candidates = [router for router in ready if router.silent_seconds <= MAX_SILENT_SECONDS] or ready
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    if not affinity_key:
        return min(candidates, key=lambda router: router.num_in_flight)
    fair_share = sum(router.num_in_flight for router in candidates) / len(candidates)
    limit = SPREAD * fair_share + SLACK_REQUESTS
    return max(
        (router for router in candidates if router.num_in_flight <= limit),
        key=lambda router: xxhash.xxh3_64_intdigest(affinity_key, seed=router.salt),
    )
