"""What the load ledger keeps of shards that have gone. tests/property/test_load_ledger.py checks its sums."""

from __future__ import annotations

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
