"""OtherCells is what an edge knows of its own cell and the others: their routers, how far they are, and how soon a
request begins there."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import structlog

from edge_http.cells.policy import CellView, ordered_cells
from edge_http.cells.prefix_homes import PrefixHomes
from edge_http.metrics import EdgeMetrics
from kvloom.errors import KvloomError
from kvloom.router_link.group import RouterGroup
from kvloom.router_link.link import GrpcRouterLink, LinkRequest
from kvloom.v1.overview_pb2 import GetStartsRequest, ModelStart
from kvloom_common.access.tenants import residency_error
from kvloom_common.config import CellConfig, ConfigError, KvloomConfig, RedisConfig
from kvloom_common.discovery.router_finder import RouterFinder
from kvloom_common.trust.seal import PLAIN, Sealer

log = structlog.get_logger()

ASK_SECONDS: Final = 1.0
"""Routers are asked so often how soon a request begins."""
ANSWER_SECONDS: Final = 2.0
"""How long a router may take to answer."""
FRESH_SECONDS: Final = 5.0
"""A cell none of whose routers has answered for longer is asked for requests after the others."""
MAX_ADDRESSES: Final = 4096
NUM_ROUND_TRIPS: Final = 8
"""The shortest of so many counts: the others have waited for something."""

Residency = Callable[[str], Sequence[frozenset[str]]]
"""Returns sets of cells, of which a tenant's requests may use those that are in all of them."""


def no_residency(_tenant: str) -> Sequence[frozenset[str]]:
    """That of tenants which may use all cells."""
    return ()


class _RouterReport:
    """The answers of a router."""

    __slots__ = ("answered_at", "round_trips", "starts")

    def __init__(self) -> None:
        self.round_trips: deque[float] = deque(maxlen=NUM_ROUND_TRIPS)
        self.starts: dict[str, ModelStart] = {}
        """By model."""
        self.answered_at = -math.inf


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
        self._cells = [self._own, *(cell.name for cell in config.edge.cells)]
        if not self._own or self._own in self._cells[1:]:
            raise ConfigError("edge.cells needs a fabric.cell, which is none of them")
        self._routers: dict[str, Mapping[str, str]] = {}
        """By other cell: its routers, as for RouterGroup.set_routers."""
        self._cell_of: dict[str, str] = {}
        """By address, also of former routers, which may still have requests."""
        self._group = group
        self._residency = residency
        self._now = now
        self._homes = PrefixHomes()
        self._reports: dict[str, dict[str, _RouterReport]] = {cell: {} for cell in self._cells}
        """By cell and address."""
        self._num_sent: dict[str, Counter[str]] = {cell: Counter() for cell in self._cells}
        """By cell and model: requests since its routers were asked last."""
        self._num_requests: Counter[tuple[str, ...]] = Counter()
        self._lost = set(self._cells)
        """Cells none of whose routers answers."""
        metrics.watch_cells(self._num_requests, self._round_trips)

    # -- CellOrder ----------------------------------------------------------------------------------------------------

    def order(self, request: LinkRequest) -> list[str]:
        """The cells that may have the request, the best first."""
        cells = self._allowed(request.submit.tenant)
        model = request.wanted.model
        views = [view for cell in cells if (view := self._view(cell, model)) is not None]
        cached = self._homes.find(request.submit.tenant, model, request.prompt_token_ids, self._now())
        order = ordered_cells(views, cached)
        return [*order, *(cell for cell in cells if cell not in order)]

    def cell_of(self, address: str) -> str:
        """The cell of a router."""
        return self._cell_of.get(address, self._own)

    def note_sent(self, request: LinkRequest, address: str) -> None:
        """A router has got the request."""
        cell, model = self.cell_of(address), request.wanted.model
        self._num_sent[cell][model] += 1
        self._num_requests[(cell,)] += 1
        self._homes.note(request.submit.tenant, model, request.prompt_token_ids, cell, self._now())

    def refusal(self, tenant: str) -> KvloomError | None:
        """Why no router can have a request of the tenant, if that is because of its residency."""
        residency = self._residency(tenant)
        return residency_error(residency) if residency else None

    def _allowed(self, tenant: str) -> list[str]:
        residency = self._residency(tenant)
        return [cell for cell in self._cells if all(cell in some for some in residency)] if residency else self._cells

    def _view(self, cell: str, model: str) -> CellView | None:
        """None: nothing recent is known of the cell."""
        oldest = self._now() - FRESH_SECONDS
        reports = [report for report in self._reports[cell].values() if report.answered_at >= oldest]
        if not reports:
            return None
        round_trip = min(min(report.round_trips) for report in reports)
        starts = [report.starts[model] for report in reports if model in report.starts]
        if not starts:
            return CellView(cell, round_trip, math.inf, 0.0)
        wait = sum(start.wait_seconds for start in starts) / len(starts)
        each = sum(start.seconds_each for start in starts) / len(starts) ** 2
        elapsed = self._now() - max(report.answered_at for report in reports)
        wait += max(0.0, self._num_sent[cell][model] * each - elapsed)  # what was sent since then has begun meanwhile
        return CellView(cell, round_trip, wait, max(start.prefill_tokens_per_second for start in starts))

    def _round_trips(self) -> dict[tuple[str, ...], float]:
        """By cell, in seconds."""
        found = self._reports.items()
        return {(cell,): min(min(one.round_trips) for one in reports.values()) for cell, reports in found if reports}

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
        oldest = self._now() - FRESH_SECONDS
        for cell, reports in self._reports.items():
            for address in [one for one, report in reports.items() if report.answered_at < oldest]:
                del reports[address]
            self._note_lost(cell, is_lost=not reports)

    async def _ask_router(self, address: str, link: GrpcRouterLink) -> None:
        cell = self.cell_of(address)
        asked_at = self._now()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                (answer,) = await link.ask_all("GetStarts", GetStartsRequest())
        except (TimeoutError, KvloomError):
            return  # its report gets old
        report = self._reports[cell].setdefault(address, _RouterReport())
        report.answered_at = self._now()
        report.round_trips.append(report.answered_at - asked_at)
        report.starts = {start.model: start for start in answer.models}
        self._num_sent[cell].clear()

    def _note_lost(self, cell: str, *, is_lost: bool) -> None:
        if is_lost and cell not in self._lost:
            self._lost.add(cell)
            log.warning("cell_lost", cell=cell)
        elif not is_lost and cell in self._lost:
            self._lost.remove(cell)
            log.info("cell_found", cell=cell)
