"""A trace made up from a load, so that the simulator can check a plan without a recording."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import msgspec

from tools.plan.demand import PlannedLoad

BLOCK: Final = 512
"""Tokens of a block of Mooncake's format, in which the trace is written."""
_PREFIXES: Final = 16
"""So many prefixes are shared, each by its part of the requests."""


def write_trace(path: Path, demand: PlannedLoad, num_requests: int, seed: int) -> None:
    """Write requests that arrive at random (Poisson) with log-normal lengths around the demand's means, of which the
    cached share is a prefix that others have, too. Raises OSError."""
    rng = random.Random(seed)
    shared_blocks = round(demand.prompt_tokens * demand.cached_share / BLOCK)
    at, lines, next_block = 0.0, [], _PREFIXES * (shared_blocks + 1)
    for _ in range(num_requests):
        at += rng.expovariate(demand.requests_per_second)
        prompt = max(shared_blocks * BLOCK + 16, round(demand.prompt_tokens * _spread(rng)))
        first = rng.randrange(_PREFIXES) * shared_blocks
        own = prompt // BLOCK - shared_blocks
        blocks = [*range(first, first + shared_blocks), *range(next_block, next_block + own)]
        next_block += own
        output = max(1, round(demand.output_tokens * _spread(rng)))
        lines.append({"timestamp": at * 1e3, "input_length": prompt, "output_length": output, "hash_ids": blocks})
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)) + b"\n")


def _spread(rng: random.Random) -> float:
    """Draw from a log-normal distribution with the mean 1 and the standard deviation of about 0.5."""
    sigma = 0.47
    return rng.lognormvariate(-sigma * sigma / 2, sigma)
