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


def _rate_to_proto(rate: RateState | None) -> pb.RateState | None:
    if rate is None:
        return None
    return pb.RateState(limit=rate.limit, remaining=rate.remaining, reset_seconds=rate.reset_seconds)


def _rate_from_proto(rate: pb.RateState) -> RateState:
    return RateState(rate.limit, rate.remaining, rate.reset_seconds)
