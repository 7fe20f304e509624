"""The engine's recent speed, which its load reports contain and routers plan with."""

from __future__ import annotations

_DECAY = 0.9
"""The weight of the past at every decode step: about the last ten steps count."""
_HALF_LIFE_TOKENS = 2048
"""After this many tokens of prefill, earlier measurements count half. The decay is by tokens, so that a few cached
prompts with little left to compute do not make the engine look slow."""


class StepSpeed:
    """Moving averages of prefill speed and decode step time, which are separated in steps that do both."""

    def __init__(self) -> None:
        self.decode_step_seconds = 0.0
        """The time of a step without prefill; 0 = unknown so far."""
        self._prefill_tokens = 0.0
        self._prefill_seconds = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """0 = unknown so far."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds else 0.0

    def add(self, num_prefill_tokens: int, step_seconds: float, *, num_decoding: int) -> None:
        """Add the measurement of one step."""
        if not num_prefill_tokens:
            known = self.decode_step_seconds
            self.decode_step_seconds = _DECAY * known + (1 - _DECAY) * step_seconds if known else step_seconds
            return
        if num_decoding:
            # Subtract the time of decoding alone, but always leave some time for the prefill.
            step_seconds = max(step_seconds - self.decode_step_seconds, 0.1 * step_seconds)
        decay = 0.5 ** (num_prefill_tokens / _HALF_LIFE_TOKENS)
        self._prefill_tokens = decay * self._prefill_tokens + num_prefill_tokens
        self._prefill_seconds = decay * self._prefill_seconds + step_seconds
