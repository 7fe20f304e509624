"""How long a modelled shard computes: the formula of fleet_model, per step and per prompt."""

from __future__ import annotations

from collections.abc import Iterable

from tools.simulate.fleet.decode_run import DecodeRun
from tools.simulate.fleet.fleet_model import Profile


def prefill_seconds(profile: Profile, position: int, num_tokens: int) -> float:
    """Of `num_tokens` tokens of one prompt behind `position` others, in steps that are long enough to be bound by
    compute."""
    return num_tokens * (
        profile.seconds_per_prefill_token + profile.seconds_per_attention_pair * (position + 0.5 * num_tokens)
    )


def prefill_step_seconds(
    profile: Profile, chunks: Iterable[tuple[int, int]], num_decoding: int, num_context_tokens: int
) -> float:
    """Of one step that prefills `chunks`, (position, tokens) each, and decodes one token of `num_decoding` sequences
    with `num_context_tokens` tokens of context together."""
    num_tokens = 0
    num_pairs = 0.0
    for position, count in chunks:
        num_tokens += count
        num_pairs += count * (position + 0.5 * count)
    return (
        max(profile.step_floor_seconds, profile.seconds_per_prefill_token * num_tokens)
        + profile.seconds_per_attention_pair * num_pairs
        + profile.seconds_per_context_token * num_context_tokens
        + profile.seconds_per_decode_sequence * num_decoding
    )


def decode_run(profile: Profile, num_decoding: int, num_context_tokens: int, slowness: float) -> DecodeRun:
    """Steps that only decode, until a sequence ends or comes in."""
    first = prefill_step_seconds(profile, (), num_decoding, num_context_tokens)
    return DecodeRun(first * slowness, profile.seconds_per_context_token * num_decoding * slowness)
