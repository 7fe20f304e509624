"""The headers that tell callers of their limits per minute, in the format of each API, with names in lower case."""

from __future__ import annotations

import datetime
import math
from typing import Final

from kvloom.tenancy.limits_state import LimitsState, RateState

_OPENAI: Final = "x-ratelimit-{what}-{unit}"
_ANTHROPIC: Final = "anthropic-ratelimit-{unit}-{what}"
_WHAT: Final = ("limit", "remaining", "reset")
_ANTHROPIC_TOKENS: Final = ("tokens", "input-tokens", "output-tokens")
"""One limit counts all tokens, so it is also the one of each kind."""

OPENAI_LIMIT_HEADERS: Final = tuple(
    _OPENAI.format(what=what, unit=unit) for unit in ("requests", "tokens") for what in _WHAT
)
ANTHROPIC_LIMIT_HEADERS: Final = tuple(
    _ANTHROPIC.format(what=what, unit=unit) for unit in ("requests", *_ANTHROPIC_TOKENS) for what in _WHAT
)


def openai_limit_headers(state: LimitsState) -> dict[str, str]:
    """Times are durations until all of the limit is there again."""
    headers: dict[str, str] = {}
    for unit, rate in (("requests", state.requests), ("tokens", state.tokens)):
        if rate is not None:
            headers |= _headers(_OPENAI, unit, rate, duration(rate.reset_seconds))
    return headers


def anthropic_limit_headers(state: LimitsState, seconds_since_1970: float) -> dict[str, str]:
    """Times are those at which all of the limit is there again."""
    headers: dict[str, str] = {}
    if state.requests is not None:
        reset = rfc3339(seconds_since_1970 + state.requests.reset_seconds)
        headers |= _headers(_ANTHROPIC, "requests", state.requests, reset)
    if state.tokens is not None:
        reset = rfc3339(seconds_since_1970 + state.tokens.reset_seconds)
        for unit in _ANTHROPIC_TOKENS:
            headers |= _headers(_ANTHROPIC, unit, state.tokens, reset)
    return headers


def duration(seconds: float) -> str:
    """As OpenAI writes it: "17ms", "1.5s" or "6m0s"."""
    milliseconds = max(0, math.ceil(seconds * 1e3))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1e3:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{text}" if minutes else text


def rfc3339(seconds_since_1970: float) -> str:
    """As Anthropic writes a time: "2026-11-25T12:00:00Z". Rounded up, so that it is never too early."""
    return datetime.datetime.fromtimestamp(math.ceil(seconds_since_1970), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _headers(template: str, unit: str, rate: RateState, reset: str) -> dict[str, str]:
    values = (str(rate.limit), str(rate.remaining), reset)
    return {template.format(what=what, unit=unit): value for what, value in zip(_WHAT, values, strict=True)}
