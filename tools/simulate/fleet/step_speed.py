"""The speeds that a modelled shard measures and sends in its load reports, as moving averages.

Like a real engine it measures them from the durations of its steps. They are not taken from the model.
"""

from __future__ import annotations

from typing import Final

from tools.simulate.fleet.step_time import DecodeRun

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
