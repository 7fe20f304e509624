"""The requests of benches that send them at random times."""

from __future__ import annotations

import random

import pytest

from lab.bench.arrivals import Requests, answers_per_second, arrival_times
from tools.bench.streams import MeasuredStream
from tools.failures import CommandError

REQUESTS = Requests(num_prompt_words=20, max_tokens=40, seed=1)


def test_every_run_asks_the_same_and_finds_none_of_it_cached() -> None:
    """Runs are compared with one another, so they must differ in nothing but what is measured."""
    one, other = (REQUESTS.stream(7, "calm", run_name=name) for name in ("alone", "beside"))
    assert (one.max_tokens, one.seed) == (other.max_tokens, other.seed)
    assert len(one.prompt.split()) - len(other.prompt.split()) == 0
    assert one.prompt[:5] != other.prompt[:5]
    lengths = [REQUESTS.stream(number, "calm").max_tokens for number in range(200)]
    assert (min(lengths), max(lengths)) == (20, 40)


def test_arrivals_have_their_rate_and_keep_within_their_time() -> None:
    """A flood that is slower than asked for would prove nothing."""
    times = arrival_times(50.0, 10.0, 50.0, random.Random(1))
    assert times == sorted(times) == arrival_times(50.0, 10.0, 50.0, random.Random(1))
    assert times[0] >= 10.0
    assert times[-1] < 50.0
    assert len(times) == pytest.approx(2000, rel=0.1)


def test_more_requests_than_a_client_can_send_are_refused() -> None:
    """On a GPU short answers could ask for thousands a second: the client would be what is measured."""
    with pytest.raises(CommandError, match="longer answers"):
        arrival_times(5000.0, 0.0, 40.0, random.Random(1))


def test_the_capacity_counts_text_within_its_time() -> None:
    """Answers that began before or end after count by their share."""
    whole = MeasuredStream("a", 4, finish_reason="length", pieces_at=[1.0, 2.0, 3.0, 4.0])
    early = MeasuredStream("b", 4, finish_reason="length", pieces_at=[-1.0, -0.5, 0.5, 1.5])
    running = MeasuredStream("c", 4, pieces_at=[3.5, 4.5, 6.0])
    assert answers_per_second([whole, early, running], 0.0, 5.0) == (4 + 2 + 2) / 4 / 5.0
    with pytest.raises(CommandError, match="no answer"):
        answers_per_second([running], 0.0, 5.0)
