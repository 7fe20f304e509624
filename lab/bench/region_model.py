"""Several cells in one virtual time: in each the real router core with modelled shards, and an edge with the real
policy (edge_http/cells). People hold conversations at their time of day.

What an edge knows of a cell is as old as the way there and back. A request arrives half a round trip later, and so
does its answer. Edges survive the loss of their cell's routers and shards, and continue in another what these were
answering.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from edge_http.cells.known_cells import KnownCells
from edge_http.cells.other_cells import ASK_SECONDS
from lab.bench.modelled import BLOCK_SIZE, router_core
from tools.simulate.fleet.fleet import MODEL, FleetOptions
from tools.simulate.fleet.profile import Profile
from tools.simulate.workload import Call
from tools.simulate.world import FleetWorld

NOTICED_SECONDS: Final = 0.1
"""How soon an edge knows that a connection has broken."""
_NEVER: Final = 1e9
_PLACES: Final = (
    ("us-east", 39.0, -77.5),
    ("eu-west", 53.3, -6.3),
    ("us-west", 45.8, -119.7),
    ("eu-central", 50.1, 8.7),
    ("ap-northeast", 35.7, 139.7),
    ("ap-southeast", 1.3, 103.8),
    ("sa-east", -23.5, -46.6),
    ("ap-south", 19.1, 72.9),
)
"""Name, latitude, longitude."""
MAX_CELLS: Final = len(_PLACES)
_NUMBER_OF: Final = {name: number for number, (name, _, _) in enumerate(_PLACES)}
_KM_PER_SECOND: Final = 200_000.0 / 1.5
"""Light in glass, on ways that are half as long again as the shortest."""
_LOCAL_SECONDS: Final = 0.001
_NIGHT_SHARE: Final = 0.2
"""The rate at the quietest time, as a share of that at the busiest."""
_MEAN_TURNS: Final = 4.0
_MEAN_THINK_SECONDS: Final = 15.0
_FIRST_PROMPT_TOKENS: Final = 1500.0
_LATER_PROMPT_TOKENS: Final = 150.0
_OUTPUT_TOKENS: Final = 200.0
_MAX_CONTEXT_TOKENS: Final = 16_384

Choose = Callable[["CellEdge", "RegionTurn", float], Sequence[int]]
"""Returns the cells to which an edge would send a request, the best first."""


class RegionPlan(msgspec.Struct, frozen=True, kw_only=True):
    num_cells: int
    num_shards: int
    """The shards of each cell."""
    peak_rate: float
    """Conversations that begin per second in each cell at its busiest time."""
    resident_share: float
    """The share of conversations that may be computed only in the cell where they are held."""
    day_seconds: float
    """A day's load passes in so much time."""
    loss_seconds: float
    """How long the first cell is lost, from its busiest time on; 0: it is not."""
    profile: Profile
    seed: int


@dataclasses.dataclass(slots=True)
class RegionTurn:
    """A request of a conversation, which may be answered in several cells one after another."""

    conversation: int
    origin: int
    is_resident: bool
    num_prompt_tokens: int
    num_output_tokens: int
    asked_at: float
    num_later_turns: int
    ttft_seconds: float | None = None
    num_received: int = 0
    num_cached_tokens: int = 0
    cell: int = 0
    """Where it is, or was last."""
    lost_at: float | None = None
    pause_seconds: float | None = None
    """How long an answer stood still that has lost its cell."""
    num_moves: int = 0
    is_refused: bool = False

    @property
    def prompt_token_ids(self) -> range:
        """A conversation's prompts are beginnings of each other, and of no other's."""
        begin = (self.conversation << 16) & 0xFFFFFFFF
        return range(begin, begin + self.num_prompt_tokens)

    @property
    def tenant(self) -> str:
        return f"only/{self.origin}" if self.is_resident else "all/cells"


@dataclasses.dataclass(slots=True)
class CellEdge:
    cell: int
    num_cells: int
    known: KnownCells


def round_trips(num_cells: int) -> list[list[float]]:
    """Between the edges of each cell and the routers of each, in seconds."""
    return [
        [_LOCAL_SECONDS + 2.0 * _distance_km(one[1:], other[1:]) / _KM_PER_SECOND for other in _PLACES[:num_cells]]
        for one in _PLACES[:num_cells]
    ]


def _distance_km(one: Sequence[float], other: Sequence[float]) -> float:
    (lat, lon), (to_lat, to_lon) = (map(math.radians, place) for place in (one, other))
    chord = math.sin((to_lat - lat) / 2) ** 2
    chord += math.cos(lat) * math.cos(to_lat) * math.sin((to_lon - lon) / 2) ** 2
    return 2.0 * 6371.0 * math.asin(math.sqrt(chord))


def cell_names(num_cells: int) -> list[str]:
    return [name for name, _, _ in _PLACES[:num_cells]]


def busiest_at(plan: RegionPlan, cell: int) -> float:
    """The sun reaches the places from east to west."""
    return plan.day_seconds * ((0.5 - _PLACES[cell][2] / 360.0) % 1.0)


def own_first(edge: CellEdge, turn: RegionTurn, _now: float) -> list[int]:
    """Another cell is for losses only."""
    allowed = _allowed(edge, turn)
    return [edge.cell, *(one for one in allowed if one != edge.cell)]


def in_turn(edge: CellEdge, turn: RegionTurn, _now: float) -> list[int]:
    """Spread requests over all cells, as a load balancer does that knows nothing."""
    allowed = _allowed(edge, turn)
    first = (turn.conversation + turn.num_later_turns) % len(allowed)
    return [*allowed[first:], *allowed[:first]]


def by_cost(edge: CellEdge, turn: RegionTurn, now: float) -> list[int]:
    """Decide as edges do: by way, wait, and what is cached."""
    return _numbers(edge.known.order(turn.tenant, MODEL, turn.prompt_token_ids, now))


def without_cache(edge: CellEdge, turn: RegionTurn, now: float) -> list[int]:
    """Decide as edges would that know nothing of caches."""
    return _numbers(edge.known.order(turn.tenant, MODEL, (), now))


def _numbers(names: Sequence[str]) -> list[int]:
    return [_NUMBER_OF[name] for name in names]


def _allowed(edge: CellEdge, turn: RegionTurn) -> list[int]:
    return [turn.origin] if turn.is_resident else list(range(edge.num_cells))


class Regions:
    """One run. `turns` has the requests in the order of their ends."""

    def __init__(self, plan: RegionPlan, choose: Choose) -> None:
        self.turns: list[RegionTurn] = []
        self._plan = plan
        self._choose = choose
        self._rng = random.Random(f"{plan.seed} conversations")
        self._round_trips = round_trips(plan.num_cells)
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._call_ids = itertools.count()
        self._conversations = itertools.count()
        self._open: dict[int, RegionTurn] = {}
        """By call id."""
        names = cell_names(plan.num_cells)
        self._edges = [
            CellEdge(
                cell,
                len(names),
                KnownCells([names[cell], *(one for one in names if one != names[cell])], _residency(names)),
            )
            for cell in range(plan.num_cells)
        ]
        self._names = names
        self._worlds: list[FleetWorld | None] = [self._new_world(cell) for cell in range(plan.num_cells)]
        """None: the cell is lost."""

    def run(self) -> None:
        plan = self._plan
        for cell in range(plan.num_cells):
            self._at(self._rng.expovariate(plan.peak_rate), self._on_arrival, cell)
        if plan.loss_seconds:
            self._at(busiest_at(plan, 0), self._on_loss, 0)
        self._at(0.0, self._on_ask)
        while True:
            worlds = [(world.next_at, cell) for cell, world in enumerate(self._worlds) if world is not None]
            world_at, cell = min(worlds)
            own_at = self._heap[0][0] if self._heap else math.inf
            if own_at == world_at == math.inf:
                return
            if own_at <= world_at:
                self._now, _, call, subject = heapq.heappop(self._heap)
                call(*subject)
            else:
                self._now = world_at
                world = self._worlds[cell]
                assert world is not None
                world.step()

    def _at(self, at: float, call: Callable[..., None], *subject: Any) -> None:
        heapq.heappush(self._heap, (at, next(self._numbers), call, subject))

    def _new_world(self, cell: int) -> FleetWorld:
        options = FleetOptions(
            profile=self._plan.profile,
            num_shards=self._plan.num_shards,
            seed=self._plan.seed + cell,
            sample_interval_seconds=_NEVER,
            core_config=router_core(max_queued_requests=10**6, max_queue_seconds=600.0),
        )
        world = FleetWorld(_Ends(lambda call, now: self._on_end(cell, call, now)), options, begins_at=self._now)
        world.begin()
        return world

    # -- conversations ------------------------------------------------------------------------------------------------

    def _on_arrival(self, cell: int) -> None:
        plan, rng = self._plan, self._rng
        wave = 0.5 * (1.0 + math.cos(2.0 * math.pi * (self._now - busiest_at(plan, cell)) / plan.day_seconds))
        if rng.random() < _NIGHT_SHARE + (1.0 - _NIGHT_SHARE) * wave:
            turn = RegionTurn(
                next(self._conversations),
                cell,
                rng.random() < plan.resident_share,
                max(32, round(rng.expovariate(1.0 / _FIRST_PROMPT_TOKENS))),
                max(2, round(rng.expovariate(1.0 / _OUTPUT_TOKENS))),
                self._now,
                round(rng.expovariate(1.0 / (_MEAN_TURNS - 1.0))),
            )
            self._send(turn)
        at = self._now + rng.expovariate(plan.peak_rate)
        if at < plan.day_seconds:
            self._at(at, self._on_arrival, cell)

    def _on_next_turn(self, last: RegionTurn) -> None:
        rng = self._rng
        num_prompt_tokens = last.num_prompt_tokens + last.num_output_tokens
        num_prompt_tokens += max(1, round(rng.expovariate(1.0 / _LATER_PROMPT_TOKENS)))
        if num_prompt_tokens < _MAX_CONTEXT_TOKENS:
            num_output_tokens = max(2, round(rng.expovariate(1.0 / _OUTPUT_TOKENS)))
            turn = RegionTurn(
                last.conversation,
                last.origin,
                last.is_resident,
                num_prompt_tokens,
                num_output_tokens,
                self._now,
                last.num_later_turns - 1,
            )
            self._send(turn)

    def _send(self, turn: RegionTurn) -> None:
        """Send what is left of the answer to the first cell that can be reached."""
        edge = self._edges[turn.origin]
        up = [one for one in self._choose(edge, turn, self._now) if self._worlds[one] is not None]
        if not up:
            turn.is_refused = True
            self._finish(turn)
            return
        turn.cell = up[0]
        edge.known.note_sent(turn.tenant, MODEL, turn.prompt_token_ids, self._names[turn.cell], self._now)
        num_prompt_tokens = turn.num_prompt_tokens + turn.num_received
        first = turn.conversation * 1024
        call = Call(
            next(self._call_ids),
            num_prompt_tokens,
            turn.num_output_tokens - turn.num_received,
            [first + index for index in range(num_prompt_tokens // BLOCK_SIZE)],
            session_key=str(turn.conversation),
        )
        self._open[call.call_id] = turn
        self._at(self._now + self._round_trips[turn.origin][turn.cell] / 2.0, self._on_call, turn.cell, call)

    def _on_call(self, cell: int, call: Call) -> None:
        world = self._worlds[cell]
        if world is None:  # lost while the request was on its way
            self._on_lost_call(call.call_id, 0)
        else:
            world.add_call(call, self._now)

    def _on_end(self, cell: int, call: Call, now: float) -> None:
        turn = self._open.pop(call.call_id)
        world = self._worlds[cell]
        assert world is not None
        outcome = world.outcomes[-1]
        began_after = outcome.arrived_at + outcome.ttft_seconds + self._round_trips[turn.origin][cell] / 2.0
        if turn.ttft_seconds is None:
            turn.ttft_seconds = began_after - turn.asked_at
        if turn.lost_at is not None and turn.pause_seconds is None:
            turn.pause_seconds = began_after - turn.lost_at
        if not turn.num_moves:
            turn.num_cached_tokens = outcome.num_cached_tokens
        turn.is_refused = outcome.failed
        self._at(now + self._round_trips[turn.origin][cell] / 2.0, self._finish, turn)

    def _finish(self, turn: RegionTurn) -> None:
        self.turns.append(turn)
        if turn.num_later_turns and not turn.is_refused and self._now < self._plan.day_seconds:
            think_seconds = self._rng.expovariate(1.0 / _MEAN_THINK_SECONDS)
            self._at(self._now + think_seconds, self._on_next_turn, turn)

    # -- cells --------------------------------------------------------------------------------------------------------

    def _on_ask(self) -> None:
        for cell, world in enumerate(self._worlds):
            if world is None:
                continue
            starts = world.starts(self._now)
            for edge in self._edges:
                round_trip = self._round_trips[edge.cell][cell]
                self._at(self._now + round_trip, self._on_answer, edge, cell, starts, round_trip)
        if self._now < self._plan.day_seconds or self._open:
            self._at(self._now + ASK_SECONDS, self._on_ask)

    def _on_answer(self, edge: CellEdge, cell: int, starts: dict[str, Any], round_trip: float) -> None:
        name = self._names[cell]
        edge.known.note_answer(name, name, starts, round_trip, self._now)
        edge.known.forget_old(self._now)

    def _on_loss(self, cell: int) -> None:
        world = self._worlds[cell]
        assert world is not None
        self._worlds[cell] = None
        for call, _, num_tokens in world.unfinished(self._now):
            self._at(self._now + NOTICED_SECONDS, self._on_lost_call, call.call_id, num_tokens)
        self._at(self._now + self._plan.loss_seconds, self._on_return, cell)

    def _on_lost_call(self, call_id: int, num_tokens: int) -> None:
        turn = self._open.pop(call_id)
        if num_tokens and turn.ttft_seconds is None:
            turn.ttft_seconds = self._now - turn.asked_at  # an upper bound: it had begun before
        turn.num_received += num_tokens
        turn.lost_at, turn.pause_seconds = self._now - NOTICED_SECONDS, None
        turn.num_moves += 1
        self._send(turn)

    def _on_return(self, cell: int) -> None:
        self._worlds[cell] = self._new_world(cell)


class _Ends:
    """A workload without calls of its own, which is told when one ends."""

    block_size = BLOCK_SIZE

    def __init__(self, on_end: Callable[[Call, float], None]) -> None:
        self._on_end = on_end

    def first_calls(self) -> Iterable[tuple[float, Call]]:
        return ()

    def next_calls(self, ended: Call, now: float) -> Iterable[tuple[float, Call]]:
        self._on_end(ended, now)
        return ()


def _residency(names: Sequence[str]) -> Callable[[str], Sequence[frozenset[str]]]:
    def residency(tenant: str) -> Sequence[frozenset[str]]:
        kind, _, cell = tenant.partition("/")
        return [frozenset({names[int(cell)]})] if kind == "only" else ()

    return residency
