"""What a caller is told about its limits per minute: those of its accounts that leave least.

The SDK uses this, so it imports none of the libraries of the services.
"""

from __future__ import annotations

from typing import NamedTuple

from kvloom.v1 import error_reason_pb2 as pb


class RateState(NamedTuple):
    limit: int
    remaining: int
    reset_seconds: float
    """The time until all of the limit is there again."""


class LimitsState(NamedTuple):
    """None: there is no such limit."""

    requests: RateState | None = None
    tokens: RateState | None = None


def limits_state_to_proto(state: LimitsState) -> pb.LimitsState:
    return pb.LimitsState(requests=_rate_to_proto(state.requests), tokens=_rate_to_proto(state.tokens))


def limits_state_from_proto(state: pb.LimitsState) -> LimitsState:
    return LimitsState(
        _rate_from_proto(state.requests) if state.HasField("requests") else None,
        _rate_from_proto(state.tokens) if state.HasField("tokens") else None,
    )


def rate_limit_headers(state: LimitsState) -> dict[str, str]:
    """The headers x-ratelimit-... in OpenAI's format, in lower case."""
    headers: dict[str, str] = {}
    for name, rate in (("requests", state.requests), ("tokens", state.tokens)):
        if rate is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(rate.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(rate.remaining)
            headers[f"x-ratelimit-reset-{name}"] = duration(rate.reset_seconds)
    return headers


def duration(seconds: float) -> str:
    """As OpenAI writes it: "17ms", "1.5s" or "6m0s"."""
    milliseconds = max(0, -int(-seconds * 1e3 // 1))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1e3:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{text}" if minutes else text


def _rate_to_proto(rate: RateState | None) -> pb.RateState | None:
    if rate is None:
        return None
    return pb.RateState(limit=rate.limit, remaining=rate.remaining, reset_seconds=rate.reset_seconds)


def _rate_from_proto(rate: pb.RateState) -> RateState:
    return RateState(rate.limit, rate.remaining, rate.reset_seconds)
