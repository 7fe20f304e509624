"""OtherCells is what an edge knows of its own cell and the others: their routers, how far they are, and how soon a
request begins there."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import structlog

from edge_http.cells.known_cells import KnownCells, Residency, no_residency
from edge_http.metrics import EdgeMetrics
from kvloom.errors import KvloomError
from kvloom.router_link.group import RouterGroup
from kvloom.router_link.link import GrpcRouterLink, LinkRequest
from kvloom.v1.overview_pb2 import GetStartsRequest
from kvloom_common.access.tenants import residency_error
from kvloom_common.config import CellConfig, ConfigError, KvloomConfig, RedisConfig
from kvloom_common.discovery.router_finder import RouterFinder
from kvloom_common.trust.seal import PLAIN, Sealer

log = structlog.get_logger()

ASK_SECONDS: Final = 1.0
"""Routers are asked so often how soon a request begins."""
ANSWER_SECONDS: Final = 2.0
"""How long a router may take to answer."""
MAX_ADDRESSES: Final = 4096


class OtherCells:
    """The CellOrder of a RouterGroup (kvloom/router_link/members.py). Its `watch` must run while it is in use."""

    def __init__(
        self,
        config: KvloomConfig,
        group: RouterGroup,
        metrics: EdgeMetrics,
        residency: Residency = no_residency,
        sealer: Sealer = PLAIN,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError."""
        self._own, self._config, self._sealer = config.fabric.cell, config, sealer
        names = [self._own, *(cell.name for cell in config.edge.cells)]
        if not self._own or self._own in names[1:]:
            raise ConfigError("edge.cells needs a fabric.cell, which is none of them")
        self._routers: dict[str, Mapping[str, str]] = {}
        """By other cell: its routers, as for RouterGroup.set_routers."""
        self._cell_of: dict[str, str] = {}
        """By address, also of former routers, which may still have requests."""
        self._group = group
        self._now = now
        self._known = KnownCells(names, residency)
        self._num_requests: Counter[tuple[str, ...]] = Counter()
        self._lost = set(names)
        """Cells none of whose routers answers."""
        metrics.watch_cells(self._num_requests, self._known.round_trips)

    # -- CellOrder ----------------------------------------------------------------------------------------------------

    def order(self, request: LinkRequest) -> list[str]:
        """The cells that may have the request, the best first."""
        return self._known.order(request.submit.tenant, request.wanted.model, request.prompt_token_ids, self._now())

    def cell_of(self, address: str) -> str:
        """The cell of a router."""
        return self._cell_of.get(address, self._own)

    def note_sent(self, request: LinkRequest, address: str) -> None:
        """A router has got the request."""
        cell = self.cell_of(address)
        self._num_requests[(cell,)] += 1
        self._known.note_sent(request.submit.tenant, request.wanted.model, request.prompt_token_ids, cell, self._now())

    def refusal(self, tenant: str) -> KvloomError | None:
        """Why no router can have a request of the tenant, if that is because of its residency."""
        residency = self._known.residency(tenant)
        return residency_error(residency) if residency else None

    # -- asking -------------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Find the routers and ask them until cancelled."""
        finders = [RouterFinder(*self._finding(cell), self._sealer) for cell in self._config.edge.cells]
        try:
            for finder in finders:
                finder.start()
            while True:
                await self.ask()
                await asyncio.sleep(ASK_SECONDS)
        finally:
            await asyncio.gather(*(finder.close() for finder in finders))

    def _finding(self, cell: CellConfig) -> tuple[KvloomConfig, Callable[[Mapping[str, str]], None]]:
        """The configuration by which routers of the cell are found, and who is told."""
        replace = msgspec.structs.replace
        found = replace(
            self._config,
            edge=replace(self._config.edge, routers=cell.routers),
            router=replace(self._config.router, port=0),
            redis=RedisConfig(url=cell.redis_url, key_prefix=cell.key_prefix),
        )
        return found, functools.partial(self.set_routers, cell.name)

    def set_routers(self, cell: str, routers: Mapping[str, str]) -> None:
        """Replace the routers of another cell, as RouterGroup.set_routers does."""
        self._routers[cell] = routers
        self._cell_of.update(dict.fromkeys(routers, cell))
        while len(self._cell_of) > MAX_ADDRESSES:
            del self._cell_of[next(iter(self._cell_of))]
        others = {address: incarnation for some in self._routers.values() for address, incarnation in some.items()}
        self._group.use_cells(self, others)

    async def ask(self) -> None:
        """Ask all routers once how soon a request begins."""
        links = self._group.connected_links
        asking = (self._ask_router(address, link) for address, link in links.items())
        # A link that is closed meanwhile cancels its call, and that alone.
        for answer in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(answer, Exception):
                log.error("cell_question_failed", exc_info=answer)
        for cell, answers in self._known.forget_old(self._now()).items():
            self._note_lost(cell, is_lost=not answers)

    async def _ask_router(self, address: str, link: GrpcRouterLink) -> None:
        cell = self.cell_of(address)
        asked_at = self._now()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                (answer,) = await link.ask_all("GetStarts", GetStartsRequest())
        except (TimeoutError, KvloomError):
            return  # its report gets old
        now, starts = self._now(), {start.model: start for start in answer.models}
        self._known.note_answer(cell, address, starts, now - asked_at, now)

    def _note_lost(self, cell: str, *, is_lost: bool) -> None:
        if is_lost and cell not in self._lost:
            self._lost.add(cell)
            log.warning("cell_lost", cell=cell)
        elif not is_lost and cell in self._lost:
            self._lost.remove(cell)
            log.info("cell_found", cell=cell)
