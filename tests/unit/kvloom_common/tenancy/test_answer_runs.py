"""An answer whose client says where it continues is counted at least as far as it was computed."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from kvloom_common.tenancy.usage_record import MAX_LOST_TOKENS, OUTCOME_LOST, AnswerRun, counting, last_runs
from tests.fakes.usage import usage_record


def spans(*runs: tuple[int, int]) -> list[tuple[int, int]]:
    """Those that count, in order."""
    found = [AnswerRun(begin, end, ("", number)) for number, (begin, end) in enumerate(runs)]
    return sorted((run.begin, run.end) for run in last_runs(found))


def test_a_killed_router_loses_nothing() -> None:
    """Its record is behind what it had delivered, or a little ahead of it; the next router knows better."""
    assert spans((0, 80), (100, 120)) == [(100, 120)]
    assert spans((0, 100), (97, 120), (119, 150)) == [(119, 150)]


def test_what_a_killed_router_computed_is_not_paid_twice() -> None:
    """However much was on its way: the client knows no better than to continue behind what it has. Once, and not by a
    client that only says so."""
    killed = usage_record(1, "a", "r0/1", num_output_tokens=100, answer_id="x", outcome=OUTCOME_LOST, num_attempts=1)
    after = {"num_output_tokens": 120, "num_resumed_tokens": 30, "answer_id": "x", "num_attempts": 1}
    first, second = (usage_record(1, "a", f"{router}/1", **after) for router in ("r1", "r2"))
    assert counting([killed, first]) == [first]
    assert len(counting([killed, first, second])) == 2
    running = msgspec.structs.replace(killed, outcome="stop")
    assert len(counting([running, first])) == 2


def test_repetitions_count_by_themselves() -> None:
    """A ticket that is used again has the same tokens computed again."""
    assert spans((0, 20), (0, 20), (0, 20)) == [(0, 20)] * 3
    assert spans((0, 20), (1, 20)) == [(0, 20), (1, 20)]
    assert spans((0, 100), (50, 100), (100, 120)) == [(50, 100), (100, 120)]


def test_what_was_lost_is_computed_again_once() -> None:
    """Otherwise every shorter run after a killed router would be free."""
    lost = AnswerRun(0, 40, ("", 0), is_lost=True)
    again = [AnswerRun(1, end, ("", end)) for end in (20, 21, 22)]
    assert sum(run.end for run in last_runs([lost, *again])) == 40 + 21 + 22


def test_a_claim_beyond_what_was_delivered_counts_as_output() -> None:
    """Nothing else bounds what is prefilled for it."""
    assert spans((0, 1), (6000, 6002)) == [(6000, 6002)]


def test_edges_are_believed() -> None:
    """The last router of their answers begins behind what was delivered, however much was lost before."""
    hung = usage_record(1, "a", "r0/1", num_output_tokens=100)
    last = usage_record(1, "a", "r1/1", num_output_tokens=90, num_resumed_tokens=30)
    assert counting([hung, last]) == [last]
    outside = [msgspec.structs.replace(record, answer_id="x") for record in (hung, last)]
    assert sorted(record.producer for record in counting(outside)) == ["r0/1", "r1/1"]


SPANS = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)
RUNS = st.lists(st.tuples(SPANS, st.booleans()), min_size=1, max_size=6)


@given(RUNS)
@example([([0, 20], True), ([1, 19], False), ([1, 20], False)])
def test_what_is_computed_counts(runs: list[tuple[list[int], bool]]) -> None:
    """Whatever positions a client names, and in whatever order records arrive."""
    named = [AnswerRun(span[0], span[1], ("", number), is_lost) for number, (span, is_lost) in enumerate(runs)]
    counted = last_runs(named)
    computed = sum(run.end - run.begin for run in named if not run.is_lost)
    total = sum(run.end for run in counted)
    assert total >= max(computed - MAX_LOST_TOKENS, *(run.end for run in named), 0)
    for order in itertools.islice(itertools.permutations(named), 24):
        assert sorted(last_runs(order)) == sorted(counted)
