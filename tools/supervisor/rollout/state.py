"""How far a rollout is, as commands show it. It imports nothing: every command reads the state of the fabric."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class RolloutState:
    """How far a rollout is."""

    old: str
    new: str
    phase: str = "loading"
    """"loading", "serving", "finishing", "rolling back"; at the end "done", "rolled back" or "failed"."""
    share: float = 0.0
    """In percent."""
    step: int = 0
    """From 1; 0 before the first one."""
    num_steps: int = 0
    reason: str = ""
    """Why it was rolled back, or failed."""

    @property
    def has_ended(self) -> bool:
        return self.phase in ("done", "rolled back", "failed")
