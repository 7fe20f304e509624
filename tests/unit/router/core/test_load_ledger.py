"""What the load ledger keeps of shards that have gone. tests/property/test_load_ledger.py checks its sums."""

from __future__ import annotations

import random

import pytest

from router.core.load.load_ledger import LoadLedger
from router.core.load.load_view import Reservation


def _learn(ledger: LoadLedger, shard_id: str, seconds: float) -> None:
    """The shard needs so long for each of some prompts of 1000 tokens."""
    for number in range(200):
        now = 1000.0 * number
        ledger.reserve(("r", number), Reservation(shard_id, 1, 1000, 0, 63, now))
        ledger.note_starts(shard_id, [(("r", number), 0.0)], now + seconds)
        ledger.release(("r", number))


def test_a_new_shard_begins_with_the_speed_of_its_model() -> None:
    """It would otherwise be given too much or too little until it has been measured itself."""
    ledger = LoadLedger()
    ledger.add_shard("old", "m", 1000)
    unlearned = ledger.view("old").speed.seconds_per_token
    _learn(ledger, "old", 10.0)
    ledger.add_shard("new", "m", 1000)
    ledger.remove_shard("old")
    ledger.add_shard("newer", "m", 1000)
    assert ledger.view("new").speed.seconds_per_token > 5 * unlearned
    assert ledger.view("newer").speed.seconds_per_token > 5 * unlearned
    ledger.check_integrity()


def test_the_speed_of_a_model_is_forgotten_with_its_last_shard() -> None:
    """Models are loaded and unloaded under ever new names while a router runs, and its memory is bounded."""
    ledger = LoadLedger()
    ledger.add_shard("stays", "m", 1000)
    for number in range(20):
        ledger.add_shard("comes and goes", f"model {number}", 1000)
        unlearned = ledger.view("comes and goes").speed.seconds_per_token
        _learn(ledger, "comes and goes", 10.0)
        ledger.remove_shard("comes and goes")
        ledger.check_integrity()
        ledger.add_shard("comes and goes", f"model {number}", 1000)
        assert ledger.view("comes and goes").speed.seconds_per_token == unlearned
        ledger.remove_shard("comes and goes")


def _prefill_short_prompts(ledger: LoadLedger, num_prompts: int, mean_seconds: float, began_at: float) -> float:
    """One after the other, each as long as chance has it. Returns when the last one ended."""
    rng, now = random.Random(5), began_at
    for number in range(num_prompts):
        key = ("r", number)
        ledger.reserve(key, Reservation("a", 1, 100, 0, 7, now))
        now += rng.uniform(0.8, 1.2) * mean_seconds
        ledger.note_starts("a", [(key, 0.0)], now)
        ledger.release(key)
    return now


def test_short_prefills_are_learned_from_fifty_times_a_second() -> None:
    """All of them would cost more than they tell. The chosen ones are a fair sample, and a shard that becomes slow is
    found out within seconds."""
    ledger = LoadLedger()
    ledger.add_shard("a", "m", 1000)
    speed = ledger.view("a").speed
    now = _prefill_short_prompts(ledger, 2000, 0.002, 10.0)
    assert 150 <= speed.num_observations <= 50 * (now - 10.0) + 1
    assert speed.request_seconds(100, 0, 0) == pytest.approx(0.002, rel=0.2)
    _prefill_short_prompts(ledger, 700, 0.006, now)
    assert speed.request_seconds(100, 0, 0) == pytest.approx(0.006, rel=0.35)


def test_every_prefill_that_takes_long_is_learned_from() -> None:
    """There is no hurry, and a shard of long prompts has few."""
    ledger = LoadLedger()
    ledger.add_shard("a", "m", 1000)
    _prefill_short_prompts(ledger, 200, 0.2, 10.0)
    assert ledger.view("a").speed.num_observations == 200
