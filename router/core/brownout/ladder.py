"""The steps of the brownout ladder, and what they do to a request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import BrownoutStepConfig
from router.core.degradation import Degradation
from router.core.events import Request, TierRank

TIERS: Final = {"interactive": TierRank.INTERACTIVE, "batch": TierRank.BATCH}
"""By their names in the configuration. The router's own requests are in no tier that a step concerns."""


class Effects(NamedTuple):
    """The effects of a step and those below it on requests of one tier."""

    max_tokens: float = math.inf
    max_choices: float = math.inf
    max_queue_seconds: float = math.inf
    no_speculation: bool = False
    smaller_model: bool = False
    sheds: bool = False

    def with_step(self, step: BrownoutStepConfig, name: str) -> Effects:
        """These, and those of the next step for the tier of this name: the stricter of two limits holds."""
        return Effects(
            min(self.max_tokens, step.max_tokens or math.inf),
            min(self.max_choices, step.max_choices or math.inf),
            min(self.max_queue_seconds, step.max_queue_seconds or math.inf),
            self.no_speculation or step.no_speculation,
            self.smaller_model or step.smaller_model,
            self.sheds or name in step.shed,
        )


class Refusal(NamedTuple):
    effect: str
    """The key of the step that refuses the request."""
    message: str


NO_EFFECTS: Final = Effects()


class Ladder:
    """The effects of every step for every tier, added up."""

    def __init__(self, steps: Sequence[BrownoutStepConfig]) -> None:
        self._effects: dict[tuple[int, TierRank], Effects] = {}
        for name, tier in TIERS.items():
            effects = NO_EFFECTS
            for number, step in enumerate(steps, start=1):
                if name in step.applies_to:
                    effects = effects.with_step(step, name)
                self._effects[number, tier] = effects

    def effects(self, step: int, tier: TierRank) -> Effects:
        return self._effects.get((step, tier), NO_EFFECTS)


def refusal(
    request: Request, effects: Effects, step: int, predicted_wait_seconds: Callable[[], float]
) -> Refusal | None:
    """Why the request is refused on this step; None: it is not. `predicted_wait_seconds` is called only if it
    matters."""
    where = f"The model {request.model!r} is overloaded (step {step} of its brownout)"
    if effects.smaller_model and request.has_fallback_model:
        return Refusal("smaller_model", f"{where}: the request is passed on to the next model that it allows.")
    if effects.sheds:
        return Refusal("shed", f"{where}: requests of the tier {request.tier.name.lower()!r} are refused for now.")
    if len(request.choices) > effects.max_choices:
        most = int(effects.max_choices)
        return Refusal("max_choices", f"{where}: n may be at most {most} for now, got {len(request.choices)}.")
    if effects.max_queue_seconds < math.inf:
        wait_seconds = predicted_wait_seconds()
        if wait_seconds > effects.max_queue_seconds:
            most = f"more than {effects.max_queue_seconds:g}"
            return Refusal("max_queue_seconds", f"{where}: it would wait {wait_seconds:.1f} seconds, {most}.")
    return None


def refused(found: Refusal, retry_after_seconds: float) -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_BROWNOUT,
        found.message,
        field="n" if found.effect == "max_choices" else "",
        retry_after_seconds=retry_after_seconds,
    )


def degradation(request: Request, effects: Effects, step: int) -> Degradation | None:
    """How the request's answer is degraded; None: it is as it would be without overload."""
    if request.pooling is not None:
        return None
    asked = math.inf if request.max_tokens is None else request.max_tokens
    max_tokens = int(effects.max_tokens) if effects.max_tokens < asked else None
    if max_tokens is None and not effects.no_speculation:
        return None
    return Degradation(step, max_tokens, effects.no_speculation)
