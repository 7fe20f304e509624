"""How much an account may use. The message `Limits` in control_service.proto describes every field."""

from __future__ import annotations

import msgspec

from kvloom.v1 import control_service_pb2 as pb


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """0: no limit of this kind. The names are those of the message."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    tokens_per_day: int = 0
    max_concurrent_requests: int = 0
    max_prompt_tokens: int = 0
    max_output_tokens: int = 0
    monthly_budget_nanos: int = 0
    """Billionths of the currency."""
    shadow: bool = False
    cached_token_percent: int = 100
    reasoning_token_percent: int = 100
    kv_share_percent: int = 0
    """Guarantees something and limits nothing."""

    @property
    def are_none(self) -> bool:
        """True when nothing is limited."""
        limits = msgspec.structs.replace(self, kv_share_percent=0) if self.kv_share_percent else self
        return limits in (NO_LIMITS, _SHADOW_OF_NOTHING)

    def weighted_tokens(self, num_prompt: int, num_cached: int, num_output: int, num_reasoning: int) -> int:
        """Returns the tokens that a request counts as; rounded up. `num_cached` are some of the prompt's tokens, and
        `num_reasoning` some of the output's."""
        hundredths = (
            100 * (num_prompt - num_cached + num_output - num_reasoning)
            + self.cached_token_percent * num_cached
            + self.reasoning_token_percent * num_reasoning
        )
        return -(-hundredths // 100)


NO_LIMITS = Limits()
_SHADOW_OF_NOTHING = Limits(shadow=True)


def limits_from_proto(limits: pb.Limits) -> Limits:
    return Limits(
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.tokens_per_day,
        limits.max_concurrent_requests,
        limits.max_prompt_tokens,
        limits.max_output_tokens,
        limits.monthly_budget_nanos,
        limits.shadow,
        limits.cached_token_percent if limits.HasField("cached_token_percent") else 100,
        limits.reasoning_token_percent if limits.HasField("reasoning_token_percent") else 100,
        limits.kv_share_percent,
    )


def limits_to_proto(limits: Limits) -> pb.Limits:
    return pb.Limits(
        requests_per_minute=limits.requests_per_minute,
        tokens_per_minute=limits.tokens_per_minute,
        tokens_per_day=limits.tokens_per_day,
        max_concurrent_requests=limits.max_concurrent_requests,
        max_prompt_tokens=limits.max_prompt_tokens,
        max_output_tokens=limits.max_output_tokens,
        monthly_budget_nanos=limits.monthly_budget_nanos,
        shadow=limits.shadow,
        cached_token_percent=limits.cached_token_percent,
        reasoning_token_percent=limits.reasoning_token_percent,
        kv_share_percent=limits.kv_share_percent,
    )
