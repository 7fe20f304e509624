"""The duration of steps and prompts by the formula in profile.py.

The speeds that a modelled shard measures and sends in its load reports, as moving averages.

Like a real engine it measures them from the durations of its steps. They are not taken from the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from tools.simulate.fleet.profile import Profile


def prefill_seconds(profile: Profile, position: int, num_tokens: int) -> float:
    """The prefill time of `num_tokens` tokens of one prompt after `position` others, in compute-bound steps."""
    return num_tokens * (
        profile.seconds_per_prefill_token + profile.seconds_per_attention_pair * (position + 0.5 * num_tokens)
    )


def prefill_step_seconds(
    profile: Profile, chunks: Iterable[tuple[int, int]], num_decoding: int, num_context_tokens: int
) -> float:
    """Returns the seconds of one step that prefills `chunks`, (position, tokens) each, and decodes one token of
    `num_decoding` sequences with `num_context_tokens` tokens of context together."""
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


class DecodeRun(NamedTuple):
    """A run of steps that only decode, in closed form. Each step is longer than the one before by the same amount."""

    first_seconds: float
    """The duration of the first step."""
    growth_seconds: float
    """How much longer each step is than the one before, because every sequence has one more token of context."""

    def seconds(self, num_steps: int) -> float:
        """The duration of the first `num_steps` steps."""
        return num_steps * self.first_seconds + self.growth_seconds * (num_steps * (num_steps - 1) // 2)

    def count_ended(self, elapsed_seconds: float) -> int:
        """How many steps have ended after this time."""
        slope = self.first_seconds - 0.5 * self.growth_seconds
        root = math.sqrt(slope * slope + 2 * self.growth_seconds * elapsed_seconds)
        count = int(2 * elapsed_seconds / (slope + root))
        # The formula is subject to rounding; `seconds` is authoritative.
        while self.seconds(count + 1) <= elapsed_seconds:
            count += 1
        while count and self.seconds(count) > elapsed_seconds:
            count -= 1
        return count

    def count_until(self, elapsed_seconds: float) -> int:
        """The smallest number of steps that takes at least this time."""
        count = self.count_ended(elapsed_seconds)
        return count if self.seconds(count) >= elapsed_seconds else count + 1


_DECAY: Final = 0.9
"""The weight of earlier decode steps at every new one."""
_HALF_LIFE_TOKENS: Final = 2048
"""After so many prefill tokens the weight of earlier measurements is halved."""


class ModelledStepSpeed:
    def __init__(self) -> None:
        self.decode_step_seconds = 0.0
        """The duration of a step without prefill. 0 means not known yet."""
        self._prefill_tokens = 0.0
        self._prefill_seconds = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """0 means not known yet."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds else 0.0

    def add_prefill_step(self, num_prefill_tokens: int, seconds: float, *, num_decoding: int) -> None:
        if num_decoding:
            # Subtract the time that decode would have taken by itself, but leave at least a tenth.
            seconds = max(seconds - self.decode_step_seconds, 0.1 * seconds)
        decay = 0.5 ** (num_prefill_tokens / _HALF_LIFE_TOKENS)
        self._prefill_tokens = decay * self._prefill_tokens + num_prefill_tokens
        self._prefill_seconds = decay * self._prefill_seconds + seconds

    def add_decode_run(self, run: DecodeRun, num_steps: int) -> None:
        """Add `num_steps` steps to the average one after another, in closed form."""
        if not num_steps:
            return
        first, growth = run
        average = self.decode_step_seconds
        if not average:
            average = first
            first += growth
            num_steps -= 1
        decay = _DECAY**num_steps
        lag = 1 / (1 - _DECAY)
        # The fixed point of the recursion for a line is the line itself, shifted by the average's lag.
        shift = first - growth * lag
        self.decode_step_seconds = decay * (average - shift) + shift + growth * num_steps
