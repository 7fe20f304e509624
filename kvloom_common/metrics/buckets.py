"""The buckets of the histograms. Every process uses the same ones, so that their figures can be compared."""

from __future__ import annotations

from typing import Final

LATENCY_SECONDS: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
"""For requests, and for parts of them."""
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
"""For the time between tokens."""
TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144)
"""For the lengths of prompts and answers."""
FEW_TOKENS: Final = (0, 1, 2, 3, 4, 8, 16, 32, 64)
