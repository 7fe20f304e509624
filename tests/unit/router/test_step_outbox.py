"""The outbox of a client merges waiting steps without losing their order, and it is bounded."""

from __future__ import annotations

from router.core.frames import Finish, Start, Step
from router.links.step_outbox import StepOutbox, merge_steps


def test_one_step_passes_untouched() -> None:
    """The common case must cost nothing."""
    outbox, step = StepOutbox(), Step(slots=[1], token_ids=[5], deltas=["a"])
    assert outbox.add(step)
    assert outbox.take() is step
    assert outbox.take() is None
    assert not outbox


def test_it_reports_when_too_much_waits() -> None:
    """A client that does not read must be noticed before memory is."""
    outbox = StepOutbox(max_entries=10)
    assert all(outbox.add(Step(slots=[1], token_ids=[5], deltas=["a"])) for _ in range(5))
    assert not outbox.add(Step(slots=[1], token_ids=[5], deltas=["a"]))
    outbox.take()
    assert outbox.add(Step(slots=[1], token_ids=[5], deltas=["a"])), "taken steps must not count any more"


def test_a_client_with_many_answers_may_have_more_wait() -> None:
    """What was withheld of all of them becomes clear at once, which says nothing about how fast it reads."""
    outbox = StepOutbox(max_entries=10)
    burst = Step(slots=[1, 2], num_tokens=[200, 200], token_ids=[5] * 400, deltas=["a" * 200] * 2)
    assert not outbox.add(burst)
    assert not outbox.is_behind(num_answers=2)
    assert outbox.is_behind(num_answers=1)
    outbox.add(burst)
    assert outbox.is_behind(num_answers=2)


def test_empty_steps_count_too() -> None:
    """Otherwise a flood of them would have no bound."""
    outbox = StepOutbox(max_entries=3)
    assert [outbox.add(Step()) for _ in range(4)] == [True, True, True, False]


def test_steps_of_different_shards_are_put_side_by_side() -> None:
    """Their slots differ, so no entries need to be joined."""
    merged = merge_steps(
        [
            Step(slots=[1, 2], token_ids=[10, 20], deltas=["a", "b"], starts=[Start(1, 0)]),
            Step(slots=[3], num_tokens=[2], token_ids=[30, 31], deltas=["cd"], finishes=[Finish(3, 1)]),
        ]
    )
    assert (merged.slots, merged.num_tokens) == ([1, 2, 3], [1, 1, 2])
    assert (merged.token_ids, merged.deltas) == ([10, 20, 30, 31], ["a", "b", "cd"])
    assert [start.slot for start in merged.starts] == [1]
    assert [finish.slot for finish in merged.finishes] == [3]


def test_entries_of_one_slot_are_joined_in_order() -> None:
    """A frame has one entry per sequence, and logprobs keep the order of the tokens."""
    merged = merge_steps(
        [
            Step(slots=[1, 2], token_ids=[10, 20], deltas=["a", "b"], logprobs=[(1, "p10"), (2, "p20")]),
            Step(slots=[2, 1], num_tokens=[2, 0], token_ids=[21, 22], deltas=["cd", ""], logprobs=[(2, "p21")]),
            Step(slots=[1], token_ids=[11], deltas=["e"], logprobs=[(1, "p11")], finishes=[Finish(1, 2)]),
        ]
    )
    assert (merged.slots, merged.num_tokens) == ([1, 2], [2, 3])
    assert merged.token_ids == [10, 11, 20, 21, 22]
    assert merged.deltas == ["ae", "bcd"]
    assert merged.logprobs == [(1, "p10"), (1, "p11"), (2, "p20"), (2, "p21")]


def test_the_pieces_of_a_cached_answer_stay_apart() -> None:
    """Its client gets it in the pieces in which it would get a fresh one."""
    cached = Step(slots=[3, 3], num_tokens=[1, 1], token_ids=[7, 8], deltas=["x", "y"], has_replay=True)
    before = Step(slots=[1, 2], token_ids=[5, 6], deltas=["a", "b"], finishes=[Finish(1, 1)])
    merged = merge_steps([before, cached])
    assert (merged.slots, merged.num_tokens, merged.deltas) == ([1, 2, 3, 3], [1, 1, 1, 1], ["a", "b", "x", "y"])
