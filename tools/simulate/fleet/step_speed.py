"""How fast a modelled shard finds itself: the moving averages that its load reports carry.

Measured as a real engine measures them (from the lengths of its steps), not read off the model.
"""

from __future__ import annotations

from typing import Final

from tools.simulate.fleet.decode_run import DecodeRun

_DECAY: Final = 0.9
"""Weight of the past at every decode step."""
_HALF_LIFE_TOKENS: Final = 2048
"""After so many tokens of prefill what was measured before counts half."""


class StepSpeed:
    def __init__(self) -> None:
        self.decode_step_seconds = 0.0
        """Of a step without prefill; 0 = not known yet."""
        self._prefill_tokens = 0.0
        self._prefill_seconds = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """0 = not known yet."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds else 0.0

    def add_prefill_step(self, num_prefill_tokens: int, seconds: float, *, num_decoding: int) -> None:
        if num_decoding:
            # Without what decode would have taken by itself; never so much that nothing is left.
            seconds = max(seconds - self.decode_step_seconds, 0.1 * seconds)
        decay = 0.5 ** (num_prefill_tokens / _HALF_LIFE_TOKENS)
        self._prefill_tokens = decay * self._prefill_tokens + num_prefill_tokens
        self._prefill_seconds = decay * self._prefill_seconds + seconds

    def add_decode_run(self, run: DecodeRun, num_steps: int) -> None:
        """The average over `num_steps` steps, each in turn, in closed form."""
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
