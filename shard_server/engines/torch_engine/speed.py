"""How fast the engine has been of late: what its load reports say, and what a router plans with."""

from __future__ import annotations

_DECAY = 0.9
"""Weight of the past at every decode step: the last ten or so count."""
_HALF_LIFE_TOKENS = 2048
"""After so many tokens of prefill what was measured before counts half: by tokens, so that a few cached prompts with
little left to compute do not make the engine look slow."""


class StepSpeed:
    """Moving averages of prefill speed and decode step time, told apart in steps that do both."""

    def __init__(self) -> None:
        self.decode_step_seconds = 0.0
        """Of a step without prefill; 0 = not known yet."""
        self._prefill_tokens = 0.0
        self._prefill_seconds = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """0 = not known yet."""
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds else 0.0

    def add(self, num_prefill_tokens: int, step_seconds: float, *, num_decoding: int) -> None:
        """Take in one step."""
        if not num_prefill_tokens:
            known = self.decode_step_seconds
            self.decode_step_seconds = _DECAY * known + (1 - _DECAY) * step_seconds if known else step_seconds
            return
        if num_decoding:
            # What the decoding sequences would have taken without the prefill; never so much that none is left for it.
            step_seconds = max(step_seconds - self.decode_step_seconds, 0.1 * step_seconds)
        decay = 0.5 ** (num_prefill_tokens / _HALF_LIFE_TOKENS)
        self._prefill_tokens = decay * self._prefill_tokens + num_prefill_tokens
        self._prefill_seconds = decay * self._prefill_seconds + step_seconds
