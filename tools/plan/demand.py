"""A load as averages per request, stated or measured from a trace, and requests that are like it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tools.failures import CommandError
from tools.simulate.bound import prefill_seconds
from tools.simulate.fleet.profile import Profile
from tools.simulate.workload import Outcome

_SPELL_SECONDS: Final = 10.0
TARGETS: Final = ("streams", "tokens_per_second", "requests_per_second", "prompt", "output", "cached")


class PlannedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that a fleet is planned for: how many there are, and what they are like on average."""

    requests_per_second: float
    prompt_tokens: float
    """The mean length of a prompt."""
    output_tokens: float
    """The mean length of an answer."""
    cached_share: float
    """The share of prompt tokens whose KV is reused if no shard ever evicts any."""
    prefill_variation: float = 0.7
    """The standard deviation of the time to prefill a prompt / its mean."""
    prefill_tail: float = 1.8
    """The 90th percentile of the time to prefill a prompt / its mean."""
    peak_factor: float = 1.0
    """How many times more requests than on average arrive in the busiest tenth of all spells of ten seconds."""
    streams: float | None = None
    """Answers that are being generated at a time, where that was stated. None: it follows from the fleet's speed."""

    @property
    def uncached_tokens(self) -> float:
        """The mean number of prompt tokens that a shard must compute."""
        return max(1.0, self.prompt_tokens * (1 - self.cached_share))


def parse_targets(text: str) -> PlannedLoad:
    """Read `streams=100000,tokens_per_second=5e6,prompt=1500,output=300,cached=0.6`. Raises CommandError."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in TARGETS:
            raise CommandError(f"--targets: {name!r} is none of {', '.join(TARGETS)}")
        try:
            values[name] = float(value.replace("_", ""))
        except ValueError as error:
            raise CommandError(f"--targets: {name}: {value!r} is no number") from error
        if not (0 <= values[name] < float("inf")):
            raise CommandError(f"--targets: {name}: {value} is not between 0 and a finite number")
    return _demand(values)


def _demand(values: Mapping[str, float]) -> PlannedLoad:
    """Raises CommandError."""
    missing = [name for name in ("prompt", "output") if not values.get(name)]
    if missing:
        raise CommandError(f"--targets: {' and '.join(missing)}: how many tokens has a request of them?")
    output = values["output"]
    if not 0 <= values.get("cached", 0.0) < 1:
        raise CommandError("--targets: cached is the share of the prompt's tokens, from 0 to below 1")
    rate = values.get("requests_per_second") or values.get("tokens_per_second", 0.0) / output
    if not rate:
        raise CommandError("--targets: give tokens_per_second or requests_per_second")
    return PlannedLoad(
        requests_per_second=rate,
        prompt_tokens=values["prompt"],
        output_tokens=output,
        cached_share=values.get("cached", 0.0),
        streams=values.get("streams"),
    )


def measured_demand(outcomes: Sequence[Outcome], profile: Profile) -> PlannedLoad:
    """Return the demand of a trace, from its run in the bound's pool, which has every block of every earlier call.
    Raises CommandError if it has too few calls."""
    if len(outcomes) < 2:
        raise CommandError("the trace has less than two calls")
    arrivals = [outcome.arrived_at for outcome in outcomes]
    seconds = max(arrivals) - min(arrivals)
    if seconds <= 0:
        raise CommandError("all calls of the trace arrive at the same time")
    calls = [outcome.call for outcome in outcomes]
    num_prompt_tokens = sum(call.num_prompt_tokens for call in calls)
    prefills = [
        prefill_seconds(profile, outcome.call.num_prompt_tokens, outcome.num_cached_tokens) for outcome in outcomes
    ]
    return PlannedLoad(
        requests_per_second=len(calls) / seconds,
        prompt_tokens=num_prompt_tokens / len(calls),
        output_tokens=sum(call.num_output_tokens for call in calls) / len(calls),
        cached_share=sum(outcome.num_cached_tokens for outcome in outcomes) / num_prompt_tokens,
        prefill_variation=statistics.pstdev(prefills) / statistics.fmean(prefills),
        peak_factor=_peak_factor(arrivals),
        prefill_tail=statistics.quantiles(prefills, n=10)[-1] / statistics.fmean(prefills),
    )


def _peak_factor(arrivals: Sequence[float]) -> float:
    first = min(arrivals)
    counts = [0] * (int((max(arrivals) - first) / _SPELL_SECONDS) + 1)
    for arrival in arrivals:
        counts[int((arrival - first) / _SPELL_SECONDS)] += 1
    whole = counts[:-1]  # the last spell is not complete
    return max(1.0, statistics.quantiles(whole, n=10)[-1] / statistics.fmean(whole)) if len(whole) > 1 else 1.0


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
