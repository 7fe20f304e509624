"""The headers that tell callers of their limits per minute, in the format of each API, with names in lower case."""

from __future__ import annotations

import datetime
import itertools
import math
from typing import Final

from kvloom.limits_state import LimitsState, RateState

_WHAT: Final = ("limit", "remaining", "reset")
_OPENAI: Final = {unit: tuple(f"x-ratelimit-{what}-{unit}" for what in _WHAT) for unit in ("requests", "tokens")}
_ANTHROPIC_TOKENS: Final = ("tokens", "input-tokens", "output-tokens")
"""One limit counts all tokens, so it is also the one of each kind."""
_ANTHROPIC: Final = {
    unit: tuple(f"anthropic-ratelimit-{unit}-{what}" for what in _WHAT) for unit in ("requests", *_ANTHROPIC_TOKENS)
}
OPENAI_LIMIT_HEADERS: Final = tuple(itertools.chain.from_iterable(_OPENAI.values()))
ANTHROPIC_LIMIT_HEADERS: Final = tuple(itertools.chain.from_iterable(_ANTHROPIC.values()))


def openai_limit_headers(state: LimitsState) -> dict[str, str]:
    """Times are durations until all of the limit is there again."""
    headers: dict[str, str] = {}
    for unit, rate in (("requests", state.requests), ("tokens", state.tokens)):
        if rate is not None:
            _add(headers, _OPENAI[unit], rate, duration(rate.reset_seconds))
    return headers


def anthropic_limit_headers(state: LimitsState, seconds_since_1970: float) -> dict[str, str]:
    """Times are those at which all of the limit is there again."""
    headers: dict[str, str] = {}
    if state.requests is not None:
        reset = rfc3339(seconds_since_1970 + state.requests.reset_seconds)
        _add(headers, _ANTHROPIC["requests"], state.requests, reset)
    if state.tokens is not None:
        reset = rfc3339(seconds_since_1970 + state.tokens.reset_seconds)
        for unit in _ANTHROPIC_TOKENS:
            _add(headers, _ANTHROPIC[unit], state.tokens, reset)
    return headers


def duration(seconds: float) -> str:
    """Returns a duration as OpenAI writes it: "17ms", "1.5s" or "6m0s"."""
    milliseconds = max(0, math.ceil(seconds * 1e3))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds, rest = divmod(rest, 1000)
    text = f"{seconds}.{rest:03d}".rstrip("0") + "s" if rest else f"{seconds}s"
    return f"{minutes}m{text}" if minutes else text


def rfc3339(seconds_since_1970: float) -> str:
    """Returns a time as Anthropic writes it: "2026-11-25T12:00:00Z". Rounded up, so that it is never too early."""
    return datetime.datetime.fromtimestamp(math.ceil(seconds_since_1970), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _add(headers: dict[str, str], names: tuple[str, ...], rate: RateState, reset: str) -> None:
    limit, remaining, at = names
    headers[limit], headers[remaining], headers[at] = str(rate.limit), str(rate.remaining), reset
