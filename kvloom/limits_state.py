"""LimitsState tells a caller about its limits per minute: those of its accounts that leave least.

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


def fill_limits_state(message: pb.LimitsState, state: LimitsState) -> None:
    """Write it into an empty message, which costs a third of making one and setting it in another."""
    message.SetInParent()  # even if there is no limit
    if state.requests is not None:
        rate = message.requests
        rate.limit, rate.remaining, rate.reset_seconds = state.requests
    if state.tokens is not None:
        rate = message.tokens
        rate.limit, rate.remaining, rate.reset_seconds = state.tokens


def limits_state_to_proto(state: LimitsState) -> pb.LimitsState:
    message = pb.LimitsState()
    fill_limits_state(message, state)
    return message


def limits_state_from_proto(state: pb.LimitsState) -> LimitsState:
    return LimitsState(
        _rate_from_proto(state.requests) if state.HasField("requests") else None,
        _rate_from_proto(state.tokens) if state.HasField("tokens") else None,
    )


def _rate_from_proto(rate: pb.RateState) -> RateState:
    return RateState(rate.limit, rate.remaining, rate.reset_seconds)
