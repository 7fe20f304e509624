"""The order in which cells are asked, for all times, waits and caches."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from edge_http.cells.policy import (
    MARGIN_SECONDS,
    MARGIN_SHARE,
    CachedPrefix,
    CellView,
    ordered_cells,
    start_seconds,
)

SECONDS = st.floats(0.0, 100.0)
NAMES = ("own", "east", "south")


@st.composite
def cells(draw: st.DrawFn) -> list[CellView]:
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    waits = st.one_of(SECONDS, st.just(math.inf))
    return [CellView(name, draw(SECONDS), draw(waits), draw(st.sampled_from((0.0, 100.0, 5000.0)))) for name in names]


PREFIXES = st.none() | st.builds(CachedPrefix, st.sampled_from((*NAMES, "gone")), st.integers(32, 100_000))


@given(cells(), PREFIXES)
def test_a_request_leaves_its_cell_for_a_sufficient_gain_only(
    found: list[CellView], cached: CachedPrefix | None
) -> None:
    """A cell that is a little better would otherwise get every request, until the own one is a little better; and one
    that is much worse must not keep them."""
    order = ordered_cells(found, cached)
    assert sorted(order) == sorted(cell.name for cell in found)
    seconds = {cell.name: start_seconds(cell, cached) for cell in found}
    best = min(seconds.values())
    if order[0] == "own":
        assert math.isinf(best) or seconds["own"] <= best + margin(best)
    else:
        assert seconds[order[0]] == best
        assert seconds["own"] > best + margin(best)
    assert sorted(map(seconds.__getitem__, order[1:])) == [seconds[name] for name in order[1:]]


def margin(best: float) -> float:
    return max(MARGIN_SECONDS, MARGIN_SHARE * best)


@given(SECONDS, SECONDS, st.integers(32, 100_000))
def test_a_conversation_moves_when_the_wait_is_longer_than_its_prefill_elsewhere(
    wait: float, round_trip: float, num_tokens: int
) -> None:
    """What is cached is worth the time that another cell would take to compute it, so that the conversation is not
    moved back as soon as it has moved."""
    speed = 1000.0
    found = [CellView("own", 0.0, wait, speed), CellView("east", round_trip, 0.0, speed)]
    elsewhere = round_trip + num_tokens / speed
    goes = ordered_cells(found, CachedPrefix("own", num_tokens))[0] == "east"
    assert goes == (wait > elsewhere + margin(elsewhere))
    stays = ordered_cells(found, CachedPrefix("east", num_tokens))[0] == "east"
    assert stays == (wait + num_tokens / speed > round_trip + margin(round_trip))
    assert stays or not goes


def test_without_anything_known_the_own_cell_is_first() -> None:
    """A cell that has no shard for a request yet is not left for another that has none either."""
    nothing = [CellView(name, 0.0, math.inf, 0.0) for name in NAMES]
    assert ordered_cells(nothing, None)[0] == "own"
    assert ordered_cells([], None) == []
