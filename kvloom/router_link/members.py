"""The routers that a process knows of: one link each, and what they can serve together."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Final

from kvloom.errors import KvloomError
from kvloom.router_link.choice import RouterView, pick_router, salt_of
from kvloom.router_link.identity import MAX_SPOKEN_FOR, LinkIdentity, note_bounded
from kvloom.router_link.link import GrpcRouterLink
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo

MAX_ROUTERS: Final = 256
MAX_IDENTITIES: Final = 4 * MAX_ROUTERS

NewLink = Callable[[str, str, Callable[[], None]], GrpcRouterLink]
"""Of an address, our name, and what to call when the router's fleet or the connection has changed."""


class RouterMember:
    """One router."""

    __slots__ = ("address", "attempts", "link", "ready_models", "salt")

    def __init__(self, address: str, link: GrpcRouterLink) -> None:
        self.address = address
        self.salt = salt_of(address)
        self.link = link
        self.ready_models: frozenset[str] = frozenset()
        self.attempts: dict[int, int] = {}
        """The link's handles of the requests that this router has, by the group's."""


class RouterMembers:
    """Connected to every address of `wanted`."""

    def __init__(self, client_id: str, new_link: NewLink, on_change: Callable[[], None]) -> None:
        """`on_change` is called whenever something that is public here has changed."""
        self.wanted: dict[str, str] = {}
        """Address → incarnation that listens there; "": whoever does."""
        self.fleet = FleetState()
        """What all of them can serve; empty while none is connected."""
        self.connected = False
        self.takers: list[RouterMember] = []
        """Connected and not draining."""
        self._client_id = client_id
        self._new_link = new_link
        self._on_change = on_change
        self._members: dict[str, RouterMember] = {}
        self._identities: dict[str, LinkIdentity] = {}
        """By address, of routers that were here, too: one that hangs is forgotten by Redis, and may be back."""
        self._spoken_for: dict[tuple[str, str], int] = {}
        """See LinkIdentity; for routers that are not known here yet."""
        self._changed = asyncio.Event()

    async def follow_wanted(self) -> None:
        """Connect to those that are new. Those that are not wanted any more go when they have nothing left to do."""
        for address, incarnation_id in itertools.islice(self.wanted.items(), MAX_ROUTERS):
            if address in self._members:
                self._members[address].link.expected_incarnation_id = incarnation_id
                continue
            link = self._new_link(address, self._client_id, self._look_again)
            link.identity = self._identity(address)
            link.expected_incarnation_id = incarnation_id
            self._members[address] = RouterMember(address, link)
            await link.start()
        for address, member in list(self._members.items()):
            if address not in self.wanted and not self._is_needed(member):
                del self._members[address]
                self._look_again()
                await member.link.close()

    def _identity(self, address: str) -> LinkIdentity:
        identity = self._identities.get(address)
        if identity is None:
            identity = self._identities[address] = LinkIdentity()
            identity.delegated_losses = dict(self._spoken_for)
        while len(self._identities) > MAX_IDENTITIES:
            del self._identities[next(iter(self._identities))]
        return identity

    def link_ids(self) -> list[str]:
        return [identity.link_id for identity in self._identities.values()]

    def note_lost_by(self, link_id: str, request_id: str, num_tokens: int) -> None:
        """Said to all routers: which one had it is not known, and the others make nothing of it."""
        note_bounded(self._spoken_for, (link_id, request_id), num_tokens, MAX_SPOKEN_FOR)
        for address, identity in self._identities.items():
            identity.note_lost_by(link_id, request_id, num_tokens)
            if address in self._members:
                self._members[address].link.report_losses()

    def _is_needed(self, member: RouterMember) -> bool:
        """Though it is not wanted any more."""
        has_successor = any(self._members[a].link.connected for a in self.wanted if a in self._members)
        return member.link.connected and (bool(member.attempts) or not has_successor)

    async def close(self) -> None:
        members, self._members = self._members, {}
        for member in members.values():
            await member.link.close()
        self._look_again()

    async def wait_change(self) -> None:
        """Return after the next change."""
        await self._changed.wait()

    def addresses(self) -> list[str]:
        """Those that are connected, those that take requests first; then the others."""
        connected = [member.address for member in self._members.values() if member.link.connected]
        return list(dict.fromkeys([*(member.address for member in self.takers), *connected, *self.wanted]))

    def pick(self, model: str, affinity_key: bytes) -> RouterMember | None:
        """The one that takes a request."""
        takers = self.takers
        if len(takers) < 2:
            return takers[0] if takers else None
        views = [
            RouterView(m.address, m.salt, model in m.ready_models, len(m.attempts), m.link.silent_seconds)
            for m in takers
        ]
        picked = pick_router(views, affinity_key)
        return None if picked is None else self._members[picked.address]

    def no_taker(self) -> KvloomError:
        """Why nobody takes a request."""
        if self.connected:
            reason, message = ErrorReason.ERROR_REASON_DRAINING, "The router is stopping and takes no new requests."
        else:
            reason, message = ErrorReason.ERROR_REASON_ROUTER_LOST, "The router cannot be reached."
        return KvloomError(reason, message, retry_after_seconds=1.0)

    def _look_again(self) -> None:
        connected = [member for member in self._members.values() if member.link.connected]
        for member in connected:
            models = member.link.fleet.models
            member.ready_models = frozenset(model.name for model in models if model.num_ready_shards)
        self.connected = bool(connected)
        takers = [member for member in connected if not member.link.fleet.draining]
        self.takers = [member for member in takers if member.address in self.wanted] or takers
        self.fleet = merged_fleet([member.link.fleet for member in self.takers or connected])
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()


def merged_fleet(fleets: Iterable[FleetState]) -> FleetState:
    """Routers look at the same shards: of each model what the one says that sees most of them."""
    best: dict[str, ModelInfo] = {}
    draining = False
    for fleet in fleets:
        draining = fleet.draining
        for model in fleet.models:
            if model.name not in best or model.num_ready_shards > best[model.name].num_ready_shards:
                best[model.name] = model
    return FleetState(models=best.values(), draining=draining)
