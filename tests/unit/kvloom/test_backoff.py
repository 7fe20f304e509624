"""Exponential backoff: delays grow, stay bounded, and start again after a success."""

from __future__ import annotations

from kvloom.backoff import Backoff


def test_delays_double_up_to_the_maximum() -> None:
    """A process that cannot run must neither be started in a busy loop nor be forgotten."""
    backoff = Backoff(initial_seconds=1, max_seconds=5)
    assert [backoff.next_seconds(0.1) for _ in range(5)] == [1, 2, 4, 5, 5]


def test_a_stable_run_makes_the_next_delay_short_again() -> None:
    """One crash a day must cost the first delay each time, not the longest."""
    backoff = Backoff(initial_seconds=1, max_seconds=5, stable_seconds=30)
    for _ in range(4):
        backoff.next_seconds()
    assert backoff.next_seconds(30) == 1
    assert backoff.next_seconds() == 2


def test_the_delay_stays_bounded_after_any_number_of_failures() -> None:
    """Weeks of failures must not overflow the exponent."""
    backoff = Backoff(0.2, 15.0, num_failures=10**6)
    assert backoff.next_seconds() == 15.0


def test_jitter_multiplies_each_delay() -> None:
    """`delay_seconds` changes nothing, so that one backoff can serve many requests."""
    factors = iter([0.5, 1.0])
    backoff = Backoff(1.0, 8.0, jitter=lambda: next(factors))
    assert [backoff.delay_seconds(3), backoff.delay_seconds(9)] == [4.0, 8.0]
    assert backoff.num_failures == 0
