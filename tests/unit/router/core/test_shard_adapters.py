"""What a router expects of the adapters of a shard, between the shard's reports."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvloom.adapters import Adapter
from router.core.events import ShardAdapter
from router.core.fleet.shard_adapters import GUESSED_LOAD_SECONDS, ShardAdapters

NAMES = ("a", "b", "c")
STATES = st.lists(
    st.builds(ShardAdapter, st.sampled_from(NAMES), st.sampled_from(("1", "2")), st.booleans()),
    max_size=3,
    unique_by=lambda state: state.name,
)
EVENTS = st.lists(
    st.tuples(st.floats(0, 1), st.one_of(st.tuples(STATES, st.sampled_from((0.0, 0.5, 2.0))), st.sampled_from(NAMES)))
)


def shard_with(*states: ShardAdapter, load_seconds: float = 0.0) -> ShardAdapters:
    adapters = ShardAdapters()
    adapters.report(states, load_seconds, 0.0)
    return adapters


def test_an_adapter_of_the_same_name_is_another_one_if_its_weights_are() -> None:
    """A request that began with the one must not continue with the other."""
    adapters = shard_with(ShardAdapter("a", "1"))
    assert adapters.has(Adapter("a", "1"))
    assert not adapters.has(Adapter("a", "2"))
    assert not adapters.has(Adapter("b", "1"))


def test_the_wait_is_that_for_the_load_and_shrinks_while_it_lasts() -> None:
    """The second request for an adapter goes where the first one has begun the load, if it is placed soon after."""
    adapters, wanted = shard_with(ShardAdapter("a", "1"), load_seconds=2.0), Adapter("a", "1")
    assert adapters.wait_seconds(wanted, 10.0) == 2.0
    adapters.note_sent(wanted, 10.0)
    assert adapters.wait_seconds(wanted, 10.5) == 1.5
    adapters.note_sent(wanted, 11.0)
    assert adapters.wait_seconds(wanted, 11.0) == 1.0
    assert adapters.wait_seconds(wanted, 13.0) == 0.0
    adapters.report([ShardAdapter("a", "1", loaded=True)], 2.0, 12.5)
    assert adapters.wait_seconds(wanted, 12.5) == 0.0
    adapters.report([ShardAdapter("a", "1")], 2.0, 20.0)  # another adapter has taken its place
    assert adapters.wait_seconds(wanted, 20.0) == 2.0


def test_a_load_that_was_never_measured_costs_a_guess() -> None:
    """Otherwise the first requests of an adapter would be spread over all shards, and each would load it."""
    assert shard_with(ShardAdapter("a", "1")).wait_seconds(Adapter("a", "1"), 0.0) == GUESSED_LOAD_SECONDS


@given(events=EVENTS)
def test_waits_are_bounded_and_zero_for_what_is_loaded(
    events: Sequence[tuple[float, tuple[list[ShardAdapter], float] | str]],
) -> None:
    """Whatever is reported and sent in whatever order: an estimate that is negative, or that grows with every request,
    would keep requests away from a shard for ever, or draw all of them to it."""
    adapters, known, load_seconds, now = ShardAdapters(), {}, GUESSED_LOAD_SECONDS, 0.0
    for pause, event in events:
        now += pause
        if isinstance(event, str):
            if event in known:
                adapters.note_sent(Adapter(event, known[event].checksum), now)
        else:
            states, reported_seconds = event
            after = {state.name: state for state in states}
            has_lost = any(name not in after or after[name].checksum != known[name].checksum for name in known)
            assert adapters.report(states, reported_seconds, now) is has_lost
            known, load_seconds = after, max(load_seconds, reported_seconds)
        for state in known.values():
            wait_seconds = adapters.wait_seconds(Adapter(state.name, state.checksum), now)
            assert 0.0 <= wait_seconds <= load_seconds + 1e-9
            assert not (state.loaded and wait_seconds)
