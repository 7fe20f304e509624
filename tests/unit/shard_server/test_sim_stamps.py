"""Stamps: what the data plane's bench reads latency from."""

from __future__ import annotations

import pytest

from shard_server.engines.sim_tokens import NUM_STAMPS, TICK_SECONDS, seconds_since, stamp_of, stamp_token_ids


@pytest.mark.parametrize("age_seconds", [0.0, 0.0011, 0.2])
def test_a_stamp_tells_its_age(age_seconds: float):
    """Within a tick, wherever the clock stands, also across the list's end."""
    wrap_seconds = NUM_STAMPS * TICK_SECONDS
    for made_at in (1e-9, wrap_seconds - 0.0005, 1234.5678):
        age = seconds_since(stamp_of(made_at), made_at + age_seconds)
        assert age_seconds - 1e-6 <= age <= age_seconds + 1.5 * TICK_SECONDS


def test_each_stamp_has_a_text_of_its_own():
    """Two stamps of one text could not be told apart; texts that are no plain words would be escaped or held back."""
    texts = [None, "", " a", *(f" {_word(i)}" for i in range(NUM_STAMPS)), " aaaaaaa", " zz"]
    ids = stamp_token_ids([*texts[:5], texts[3], *texts[5:]])
    assert len(ids) == NUM_STAMPS
    with pytest.raises(ValueError, match="plain words"):
        stamp_token_ids(texts[: NUM_STAMPS // 2])


def _word(number: int) -> str:
    return "".join(chr(ord("a") + number // 26**place % 26) for place in range(4))
