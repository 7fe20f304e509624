"""The probability that cached blocks which have been idle for a while will be used again: the cost of evicting them.

It is learned from the requests themselves. A prompt that continues an earlier one is a reuse, after the time between
the two; a prompt that has not been continued yet may be later. So, with all counts decaying alike,

    P(reused | idle for `age`) = reuses with a longer gap / (reuses with a longer gap + prompts never continued)

which is close to 1 for agents that call every few seconds, and low for one-off questions.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Final

MAX_REMEMBERED_PROMPTS: Final = 65_536
MAX_NEW_BLOCKS: Final = 4096
"""How many blocks before the end of a prompt an earlier one's end is searched for."""
BINS_PER_OCTAVE: Final = 2
NUM_BINS: Final = 40
FIRST_BIN_SECONDS: Final = 0.25
"""Bins range from here to about three days."""
DECAY: Final = 0.9995
"""Decay of the counts per prompt: about the last 2,000 count."""
PRIOR_REUSES: Final = 5.0
PRIOR_ENDS: Final = 5.0
"""Before anything is known, half of all prompts are assumed to be continued."""
_SQRT_HALF: Final = 0.5**0.5
_PRIOR_LONGER: Final = [PRIOR_REUSES / NUM_BINS * (NUM_BINS - index) for index in range(NUM_BINS)]


class ReuseCurve:
    """The probability of reuse as a function of idle time."""

    def __init__(self) -> None:
        self._last_used: OrderedDict[int, float] = OrderedDict()
        """Hash of a prompt's last full block → when the prompt came."""
        self._gaps: list[float] = []
        """Reuses by their gap, for bins that ever had one: the latest bin first."""
        self._num_bins_from = [0] * (NUM_BINS + 1)
        """For each bin, how many of those lie there or later."""
        self._num_prompts = 0.0
        self._longer = [0.0]
        """Prefix sums of `_gaps`."""
        self._ends = PRIOR_ENDS
        self._is_stale = False

    @property
    def num_remembered(self) -> int:
        """The number of prompt ends that are remembered."""
        return len(self._last_used)

    def note_prompt(self, block_hashes: Sequence[int], now: float) -> None:
        """A prompt with these full blocks was placed."""
        if not block_hashes:
            return
        last_used = self._last_used
        self._decay()
        self._num_prompts += 1.0
        known = next(filter(last_used.__contains__, islice(reversed(block_hashes), MAX_NEW_BLOCKS)), None)
        if known is not None:
            self._note_gap(_bin(now - last_used.pop(known)))
        last_used[block_hashes[-1]] = now
        if len(last_used) > MAX_REMEMBERED_PROMPTS:
            last_used.popitem(last=False)
        self._is_stale = True

    def probability(self, age_seconds: float) -> float:
        """The probability that blocks idle for so long are used again."""
        if self._is_stale:
            self._sum_up()
        if not self._num_prompts:
            return PRIOR_REUSES / (PRIOR_REUSES + PRIOR_ENDS)
        index = _bin(age_seconds)
        longer = self._longer[self._num_bins_from[index]] + _PRIOR_LONGER[index]
        return longer / (longer + self._ends)

    def _note_gap(self, index: int) -> None:
        num_bins_from = self._num_bins_from
        if num_bins_from[index] > num_bins_from[index + 1]:
            self._gaps[num_bins_from[index] - 1] += 1.0
            return
        self._gaps.insert(num_bins_from[index], 1.0)
        for earlier in range(index + 1):
            num_bins_from[earlier] += 1

    def _decay(self) -> None:
        # Scaling the newest up would be cheaper, but so few multiplications cost little beside hashing a prompt.
        self._gaps = [count * DECAY for count in self._gaps]
        self._num_prompts *= DECAY

    def _sum_up(self) -> None:
        self._longer = [0.0, *accumulate(self._gaps)]
        self._ends = PRIOR_ENDS + max(0.0, self._num_prompts - self._longer[-1])
        self._is_stale = False


def _bin(seconds: float) -> int:
    if seconds <= FIRST_BIN_SECONDS:
        return 0
    if seconds >= FIRST_BIN_SECONDS * 2 ** (NUM_BINS // BINS_PER_OCTAVE):
        return NUM_BINS - 1
    mantissa, exponent = math.frexp(seconds / FIRST_BIN_SECONDS)
    return min(NUM_BINS - 1, BINS_PER_OCTAVE * (exponent - 1) + (mantissa >= _SQRT_HALF))
