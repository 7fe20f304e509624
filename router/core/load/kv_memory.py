"""How long a sequence waits for KV blocks, and what it costs those that come later.

The lengths of answers are taken to be exponential, so that each of n running sequences has the same time left on
average, however long it has run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_MAX_SUM: Final = 64


def _harmonic_sums() -> tuple[float, ...]:
    sums = [0.0]
    for number in range(1, _MAX_SUM):
        sums.append(sums[-1] + 1 / number)
    return tuple(sums)


_HARMONIC: Final = _harmonic_sums()


def wait_seconds(num_missing: int, blocks_each: float, num_running: int, residual_seconds: float) -> float:
    """The time until so many blocks are free, if every one of the running sequences frees `blocks_each` of them when it
    ends, after `residual_seconds` on average. The k-th of n ends after residual x (1/n + 1/(n-1) + ... k terms)."""
    if num_missing <= 0 or not num_running:
        return 0.0
    num_ends = math.ceil(num_missing / blocks_each)
    num_left = max(0, num_running - num_ends)
    if num_running < _MAX_SUM:
        seconds = _HARMONIC[num_running] - _HARMONIC[num_left]
    else:
        seconds = math.log(num_running / max(num_left, 1))
    if num_ends > num_running:  # those that take their places have to end as well
        seconds += (num_ends - num_running) / num_running
    return residual_seconds * seconds


def pressure_seconds(
    num_needed: int, num_free: int, blocks_each: float, num_sequences: int, residual_seconds: float
) -> float:
    """Returns what taking so many blocks costs those that come later: the wait for one more place, times the places
    that are taken, times how likely it is that all are in use when another sequence comes. In a queue with n servers
    that is about utilisation ^ (sqrt(2 (n + 1)) - 1) (Sakasegawa, 1977)."""
    if not num_sequences or not residual_seconds:
        return 0.0
    num_places = num_sequences + max(num_free, 0) / blocks_each
    num_own = num_needed / blocks_each
    utilisation = min(1.0, (num_sequences + num_own) / num_places)
    power = math.sqrt(2 * (num_places + 1)) - 1
    return residual_seconds * num_own / num_places * utilisation**power


def num_common(hashes: Sequence[int], others: Sequence[int], at_least: int = 0) -> int:
    """How many leading entries are equal, given that `at_least` are. The hashes are chained: equal entries are preceded
    by equal ones."""
    low, high = at_least, min(len(hashes), len(others))
    if low >= high or hashes[low] != others[low]:
        return low
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
