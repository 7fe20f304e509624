"""Shortest prefill first with aging: no sequence is overtaken beyond a bounded time, whatever arrives."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from shard_server.engines.queue_order import AGING, MAX_PATIENCE_SECONDS, admission_rank, count_cached_blocks
from tests.examples import num_examples

SPEED = 1000.0

tokens = st.integers(1, 200_000)
times = st.floats(0, 1000, allow_nan=False)


@given(st.lists(st.tuples(tokens, times), min_size=2, max_size=30))
def test_no_sequence_is_overtaken_by_one_submitted_later_than_its_patience(queue: list[tuple[int, float]]) -> None:
    """Patience is proportional to one's own prefill, and bounded for all."""
    for (mine, my_time), (_, their_time) in itertools.permutations(queue, 2):
        patience = min(mine / SPEED / AGING, MAX_PATIENCE_SECONDS)
        for theirs in (1, 10, 10_000):
            if their_time > my_time + patience:
                assert admission_rank(mine, SPEED, my_time) < admission_rank(theirs, SPEED, their_time)


@given(st.lists(st.tuples(tokens, times), min_size=1, max_size=30), st.floats(0, 1000))
def test_the_order_is_that_of_prefill_less_aging_times_waiting(queue: list[tuple[int, float]], later: float) -> None:
    """The definition, with a clock in it; among those whose prefill is not beyond the bound."""
    bounded = [(n, at) for n, at in queue if n / SPEED / AGING < MAX_PATIENCE_SECONDS]
    now = 1000 + later
    by_rank = sorted(bounded, key=lambda entry: admission_rank(entry[0], SPEED, entry[1]))
    waited = [n / SPEED - AGING * (now - at) for n, at in by_rank]
    assert all(a <= b + 1e-6 for a, b in itertools.pairwise(waited))


@settings(max_examples=num_examples(50))
@given(st.lists(st.tuples(st.floats(0.001, 0.5), tokens), min_size=1, max_size=60), tokens)
def test_a_long_prompt_is_served_in_bounded_time_while_short_ones_keep_coming(
    others: list[tuple[float, int]], mine: int
) -> None:
    """One engine that serves one after another, more and more work before it: only what came within the patience of
    the first sequence has gone before it."""
    arrivals = [(0.0, mine)]
    for gap, num_tokens in others:
        arrivals.append((arrivals[-1][0] + gap, num_tokens))
    now, waiting, pending = 0.0, [], list(arrivals)
    served: list[tuple[float, int]] = []
    while pending or waiting:
        now = max(now, pending[0][0]) if not waiting else now
        while pending and pending[0][0] <= now:
            waiting.append(pending.pop(0))
        waiting.sort(key=lambda entry: admission_rank(entry[1], SPEED, entry[0]))
        served.append(waiting.pop(0))
        now += served[-1][1] / SPEED
    before = served[: served.index((0.0, mine))]
    assert all(arrived <= min(mine / SPEED / AGING, MAX_PATIENCE_SECONDS) for arrived, _ in before)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_the_count_of_cached_blocks_does_not_depend_on_what_was_known(cached: int, num_blocks: int, known: int) -> None:
    """It is carried on from sort to sort, while blocks come and go."""
    assert count_cached_blocks(lambda position: position < cached, num_blocks, known) == min(cached, num_blocks)
