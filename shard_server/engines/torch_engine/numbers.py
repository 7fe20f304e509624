"""The random numbers that tokens are drawn with: functions of seed and position alone, wherever they are drawn."""

from __future__ import annotations

from typing import Final

MIN_TEMPERATURE: Final = 1e-4
"""Below, quotients might overflow; this is greedy already but among exact ties."""
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits (splitmix64, Steele et al. 2014, with the seed mixed once beforehand so
    that neighbouring seeds do not yield shifted copies of one stream)."""
    mixed = _splitmix64(_splitmix64(seed & _MASK) ^ (position * _GAMMA & _MASK))
    return (mixed >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    state = (state + _GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
