"""The brownout's place in the router core: it watches first tokens and refusals, and degrades new requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.config import BrownoutStepConfig
from router.core.action_buffer import ActionBuffer
from router.core.actions import BrownoutStepChanged, RequestDegraded
from router.core.brownout.controller import BrownoutController, StepChange
from router.core.degradation import Degradation
from router.core.events import Request, TierRank
from router.core.live import LiveRequest
from router.core.rule_settings import BrownoutSettings

OVERLOADED: Final = frozenset({ErrorReason.ERROR_REASON_QUEUE_FULL, ErrorReason.ERROR_REASON_QUEUE_TIMEOUT})
"""A request that ends so without a token has missed its objective. What the ladder itself refuses does not count, but
for max_queue_seconds."""


class Brownout:
    """Running answers are never changed: everything happens when a request arrives."""

    def __init__(
        self,
        config: BrownoutSettings,
        action_buffer: ActionBuffer,
        steps: dict[str, int],
        note_change: Callable[[], None],
        retry_after_seconds: Callable[[str, float], float],
    ) -> None:
        """`steps` is kept up to date: the models that are degraded, and their steps. `note_change` is called when it
        changes. `retry_after_seconds` spreads the retries of requests that should wait for a time."""
        self._config = config
        self._controller = BrownoutController(config)
        self._ladder = Ladder(config.steps)
        self._action_buffer = action_buffer
        self._steps = steps
        self._note_change = note_change
        self._retry_after_seconds = retry_after_seconds

    def admit(self, request: Request, predicted_wait_seconds: Callable[[], float], now: float) -> Request | KvloomError:
        """The request as it is to be served now, or why it is not. Answers that were begun elsewhere stay as they
        are."""
        step = self._steps.get(request.model)
        if step is None or request.is_continued:
            return request
        effects = self._ladder.effects(step, request.tier)
        found = refusal(request, effects, step, predicted_wait_seconds)
        if found is not None:
            self._action_buffer.add(RequestDegraded(request.model, (found.effect,)))
            if found.effect == "max_queue_seconds":
                # Otherwise the ladder would come down while it refuses what the fleet cannot serve.
                self._observe(request, now, is_good=False)
            wait_seconds = self._config.min_step_seconds
            return refused(found, self._retry_after_seconds(request.request_id, wait_seconds))
        degraded = degradation(request, effects, step)
        if degraded is None:
            return request
        self._action_buffer.add(RequestDegraded(request.model, degraded.effects))
        return msgspec.structs.replace(request, degradation=degraded)

    def preview(self, request: Request) -> Degradation | None:
        """How the answer would be degraded now, for an explanation: nothing is counted, and nothing refused."""
        step = self._steps.get(request.model)
        return None if step is None else degradation(request, self._ladder.effects(step, request.tier), step)

    def prefers_others(self, model: str, tier: TierRank) -> bool:
        """True when a request that names several models should go to another one, if that is ready."""
        step = self._steps.get(model)
        return step is not None and self._ladder.effects(step, tier).smaller_model

    def note_first_token(self, live: LiveRequest, now: float) -> None:
        """The request's client is sent its first token, which was computed for it."""
        self._observe(live.request, now, is_good=now - live.arrived_at <= self._config.ttft_slo_seconds)

    def note_end_without_token(self, live: LiveRequest, now: float) -> None:
        """A request has ended, or was refused. One that its client gave up in time says nothing, and neither does one
        with less time than the objective: otherwise clients could cause a brownout by short timeouts."""
        error = live.ended_with[1]
        slo_seconds = self._config.ttft_slo_seconds
        is_late = now - live.arrived_at > slo_seconds
        is_short = 0 < live.request.timeout_seconds < slo_seconds
        if is_late or (error is not None and error.reason in OVERLOADED and not is_short):
            self._observe(live.request, now, is_good=False)

    def pass_time(self, now: float) -> None:
        for change in self._controller.pass_time(now):
            self._on_change(change)

    def next_deadline(self) -> float:
        return self._controller.next_deadline()

    def _observe(self, request: Request, now: float, *, is_good: bool) -> None:
        if request.tier is not TierRank.INTERACTIVE or request.pooling is not None or request.is_continued:
            return
        change = self._controller.observe(request.model, now, is_good=is_good)
        if change is not None:
            self._on_change(change)

    def _on_change(self, change: StepChange) -> None:
        if change.step:
            self._steps[change.model] = change.step
        else:
            self._steps.pop(change.model, None)
        rates = change.rates
        self._action_buffer.add(
            BrownoutStepChanged(change.model, change.step, change.previous_step, rates.fast, rates.slow)
        )
        self._note_change()


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
