"""How long a request may wait in the router beside a shard that has nothing to do.

The promise of DispatchQueue, and what those that check it share: lab/dst/checkers/queueing.py and the simulator.
"""

from __future__ import annotations

from typing import Final

REPLACE_SECONDS: Final = 1.0
"""How often waiting requests are placed again: shards may be faster or slower than they seemed, or hang."""
MAX_IDLE_WAIT_SECONDS: Final = 2 * REPLACE_SECONDS
"""A request that waits is placed again between one and two periods after the last time."""


def waits_too_long(beside_idle_seconds: float, least_prefill_seconds: float) -> bool:
    """True for a request that has waited for so long beside at least one idle shard that could run it, if it would have
    its first token there after `least_prefill_seconds`."""
    return beside_idle_seconds > MAX_IDLE_WAIT_SECONDS + least_prefill_seconds
