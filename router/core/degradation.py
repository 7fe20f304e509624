"""How an answer was degraded when its request was admitted."""

from __future__ import annotations

import msgspec


class Degradation(msgspec.Struct, frozen=True):
    """It stays with the request until its end, on whatever shard it runs."""

    step: int
    """The step of the ladder on which the model was."""
    max_tokens: int | None = None
    """The most output tokens of one choice, fewer than the request asked for; None: as many as it asked for."""
    no_speculation: bool = False

    @property
    def effects(self) -> tuple[str, ...]:
        """The names of the keys of a step that changed something."""
        capped = () if self.max_tokens is None else ("max_tokens",)
        return (*capped, "no_speculation") if self.no_speculation else capped

    def __str__(self) -> str:
        """Returns it as clients see it: `2; max_tokens=256; no_speculation`."""
        parts = [str(self.step)]
        if self.max_tokens is not None:
            parts.append(f"max_tokens={self.max_tokens}")
        if self.no_speculation:
            parts.append("no_speculation")
        return "; ".join(parts)
