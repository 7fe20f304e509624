"""The configuration of the brownout ladder, on which answers are degraded under overload."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvloom_common.config.section import PositiveFloat, Section

TierName = Literal["interactive", "batch"]


class BrownoutStepConfig(Section):
    """Says what one step of the brownout ladder does, in addition to the steps before it."""

    max_tokens: Annotated[int, Meta(ge=0)] = 0
    """The most output tokens of an answer, which then ends with `length`. 0: no cap."""
    no_speculation: bool = False
    """True keeps engines from drafting tokens (`shard.torch.speculation`), which costs answers time but no quality."""
    max_choices: Annotated[int, Meta(ge=0)] = 0
    """Requests for more choices (`n`) are refused. 0: no limit."""
    smaller_model: bool = False
    """True passes requests whose route or `models` names another model on to it."""
    shed: list[TierName] = []
    """The tiers whose requests are refused."""
    max_queue_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Requests that would wait longer than this for a shard are refused, as judged by the rate at which the queue
    drains. They count as missed objectives. 0: `router.max_queue_seconds` decides."""
    applies_to: Annotated[list[TierName], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: list[TierName](("interactive", "batch"))
    )
    """The tiers whose requests the step concerns; those of others are exempt from it."""

    def __post_init__(self) -> None:
        effects = ("max_tokens", "no_speculation", "max_choices", "smaller_model", "shed", "max_queue_seconds")
        if not any(getattr(self, name) for name in effects):
            raise ValueError(f"a step needs one of {', '.join(effects)}: it does nothing")
        for tier in self.shed:
            if tier not in self.applies_to:
                raise ValueError(f"shed names {tier!r}, which applies_to exempts")


def _default_ladder() -> list[BrownoutStepConfig]:
    return [
        BrownoutStepConfig(no_speculation=True, max_tokens=1024),
        BrownoutStepConfig(smaller_model=True, max_tokens=512),
        BrownoutStepConfig(max_choices=1, max_tokens=256),
        BrownoutStepConfig(shed=["batch"], max_queue_seconds=1.0),
    ]


class BrownoutConfig(Section):
    """How answers are degraded under overload before requests are refused (docs/operate/brownout.md)."""

    moved = {
        "fast_window_seconds": "It is as long as min_step_seconds: set that",
        "slow_window_seconds": "It is six times min_step_seconds: set that",
        "step_up_burn_rate": "It is always 4: delete the line, or choose another target",
        "step_down_burn_rate": "It is always 1: delete the line, or choose another target",
        "min_requests": "It is always 10: delete the line",
    }
    enabled: bool = False
    ttft_slo_seconds: PositiveFloat = 2.0
    """The objective: an interactive request has its first token within this time."""
    target: Annotated[float, Meta(ge=0.75, lt=1)] = 0.95
    """The share of interactive requests that must meet it. The rest is the error budget, which a model must use up four
    times as fast to go one step up: below 0.75 it never could."""
    min_step_seconds: PositiveFloat = 10.0
    """How long a model is on a step, at least, before it goes further up. The fast window is as long, and shows what
    the step has done; the slow one is six times as long."""
    hold_seconds: PositiveFloat = 30.0
    """Doubled, up to eight times this, whenever the model has to go up again soon after it went down."""
    steps: Annotated[list[BrownoutStepConfig], Meta(min_length=1, max_length=16)] = msgspec.field(
        default_factory=_default_ladder
    )
    """The ladder, from the mildest step to the last."""
