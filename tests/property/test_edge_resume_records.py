"""The state that one edge leaves of an answer is what another edge reads, however it was cut, repeated or trimmed."""

from __future__ import annotations

import itertools
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_http.resume.records import (
    AnswerState,
    ChoiceProgressDelta,
    ProgressDelta,
    decode_delta,
    encode,
)
from tests.examples import num_examples

TOKENS = list(range(100, 130))


def delta(begin: int, end: int, *, with_events: bool = True) -> ProgressDelta:
    """Each token is one event."""
    events = [(1, b'"%d"' % token) for token in TOKENS[begin:end]] if with_events else []
    before = begin if with_events else end
    choice = ChoiceProgressDelta(0, begin, array("I", TOKENS[begin:end]).tobytes(), 2 * end)
    return decode_delta(encode(ProgressDelta(7, before, events, [choice], [], [], [], end == len(TOKENS))))


@settings(max_examples=num_examples(80), deadline=None)
@given(st.lists(st.integers(0, len(TOKENS)), max_size=8), st.integers(0, 9), st.integers(0, 9), st.data())
def test_state_from_snapshot_and_journal(cuts: list[int], first: int, snapshot_at: int, data: st.DataObject) -> None:
    """A journal may begin late, repeat deltas, and overlap with the snapshot: the known state has no gap and ends where
    the last delta ends, or it is marked as incomplete."""
    bounds = sorted({0, *cuts, len(TOKENS)})
    journal = [delta(begin, end) for begin, end in itertools.pairwise(bounds)]
    position = bounds[min(snapshot_at, len(bounds) - 1)]
    kept = journal[min(first, len(journal) - 1) :]
    twice = [one for one in kept for _ in range(data.draw(st.integers(1, 2)))]
    state = AnswerState(1, 1)
    state.apply_all(delta(0, position, with_events=False), twice)
    assert state.num_events == len(TOKENS)
    assert state.events == [(1, b'"%d"' % token) for token in TOKENS[kept[0].num_events_before :]]
    assert state.is_whole == (kept[0].num_events_before <= position)
    if state.is_whole:
        assert state.token_ids[0].tolist() == TOKENS
        assert state.num_chars == [2 * len(TOKENS)]
    assert state.ended
