"""KnownCells decides for an edge which cells a request may have, and which first, by what routers have answered.

Pure: time is an argument, and who asks the routers is somebody else (other_cells.py; in virtual time lab/bench/cells).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from edge_http.cells.policy import CellView, ordered_cells
from edge_http.cells.prefix_homes import PrefixHomes

FRESH_SECONDS: Final = 5.0
"""A cell none of whose routers has answered for longer is asked for requests after the others."""
NUM_ROUND_TRIPS: Final = 8
"""The shortest of so many counts: the others have waited for something."""

Residency = Callable[[str], Sequence[frozenset[str]]]
"""Returns sets of cells, of which a tenant's requests may use those that are in all of them."""


def no_residency(_tenant: str) -> Sequence[frozenset[str]]:
    """That of tenants which may use all cells."""
    return ()


class CellStart(Protocol):
    """How soon a request would begin at a router: its ModelStart, or the StartEstimate of its core."""

    @property
    def wait_seconds(self) -> float: ...
    @property
    def seconds_each(self) -> float: ...
    @property
    def prefill_tokens_per_second(self) -> float: ...


class _RouterReport:
    """The answers of a router."""

    __slots__ = ("answered_at", "round_trips", "starts")

    def __init__(self) -> None:
        self.round_trips: deque[float] = deque(maxlen=NUM_ROUND_TRIPS)
        self.starts: Mapping[str, CellStart] = {}
        """By model."""
        self.answered_at = -math.inf


class KnownCells:
    """The cells by name, the own one first."""

    def __init__(self, names: Sequence[str], residency: Residency = no_residency) -> None:
        self.residency = residency
        self._names = list(names)
        self._homes = PrefixHomes()
        self._reports: dict[str, dict[str, _RouterReport]] = {name: {} for name in names}
        """By cell and address."""
        self._num_sent: dict[str, Counter[str]] = {name: Counter() for name in names}
        """By cell and model: requests since its routers were asked last."""

    def order(self, tenant: str, model: str, prompt_token_ids: Sequence[int], now: float) -> list[str]:
        """The cells that may have the request, the best first."""
        residency = self.residency(tenant)
        cells = [one for one in self._names if all(one in some for some in residency)] if residency else self._names
        views = [view for cell in cells if (view := self._view(cell, model, now)) is not None]
        order = ordered_cells(views, self._homes.find(tenant, model, prompt_token_ids, now))
        return [*order, *(cell for cell in cells if cell not in order)]

    def note_sent(self, tenant: str, model: str, prompt_token_ids: Sequence[int], cell: str, now: float) -> None:
        """The cell has got the request."""
        self._num_sent[cell][model] += 1
        self._homes.note(tenant, model, prompt_token_ids, cell, now)

    def note_answer(
        self, cell: str, address: str, starts: Mapping[str, CellStart], round_trip_seconds: float, now: float
    ) -> None:
        """A router of the cell has answered how soon a request for each model would begin."""
        report = self._reports[cell].setdefault(address, _RouterReport())
        report.answered_at = now
        report.round_trips.append(round_trip_seconds)
        report.starts = starts
        self._num_sent[cell].clear()

    def forget_old(self, now: float) -> dict[str, bool]:
        """Forget the routers that have not answered for long. Returns for each cell whether one has answered."""
        oldest = now - FRESH_SECONDS
        for reports in self._reports.values():
            for address in [one for one, report in reports.items() if report.answered_at < oldest]:
                del reports[address]
        return {cell: bool(reports) for cell, reports in self._reports.items()}

    def round_trips(self) -> dict[tuple[str, ...], float]:
        """Return the shortest round trip to each cell that answers, in seconds."""
        found = self._reports.items()
        return {(cell,): min(min(one.round_trips) for one in reports.values()) for cell, reports in found if reports}

    def _view(self, cell: str, model: str, now: float) -> CellView | None:
        """None: nothing recent is known of the cell."""
        oldest = now - FRESH_SECONDS
        reports = [report for report in self._reports[cell].values() if report.answered_at >= oldest]
        if not reports:
            return None
        round_trip = min(min(report.round_trips) for report in reports)
        starts = [report.starts[model] for report in reports if model in report.starts]
        if not starts:
            return CellView(cell, round_trip, math.inf, 0.0)
        wait = sum(start.wait_seconds for start in starts) / len(starts)
        each = sum(start.seconds_each for start in starts) / len(starts) ** 2
        elapsed = now - max(report.answered_at for report in reports)
        wait += max(0.0, self._num_sent[cell][model] * each - elapsed)  # what was sent since then has begun meanwhile
        return CellView(cell, round_trip, wait, max(start.prefill_tokens_per_second for start in starts))
