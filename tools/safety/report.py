"""Counts what a policy does with recorded requests, by rule and tenant, and compares it with what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from safety_svc.policy import SafetyPolicy
from safety_svc.whatif import LoggedRequest, RequestOutcome, outcome_of

Effect = Literal["refused", "cut", "masked", "flagged"]
EFFECTS: Final[tuple[Effect, ...]] = ("refused", "cut", "masked", "flagged")
UNKNOWN_GUARDRAIL: Final = "(unknown guardrail)"
"""Stands for the rule where a request names one that its tenant may not use."""


class EffectCount(msgspec.Struct, frozen=True):
    """How often a rule had an effect on texts of one tenant."""

    rule: str
    tenant: str
    effect: Effect
    count: int


class ChangedOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt or an answer with which something else would happen."""

    line: int
    target: Literal["prompt", "answer"]
    was: str
    becomes: str
    id: str = ""
    tenant: str = ""
    choice: int = 0
    """The number of the answer."""


class JudgedRequest(msgspec.Struct, frozen=True):
    """A request on which a policy has an effect."""

    line: int
    id: str
    tenant: str
    outcome: RequestOutcome


class PolicyReport:
    """The effects of a policy on the requests of a log."""

    def __init__(self, policy: SafetyPolicy, *, masks_prompts: bool) -> None:
        self._policy = policy
        self._masks_prompts = masks_prompts
        self._counts: Counter[tuple[str, str, Effect]] = Counter()
        self.num_requests = 0
        self.num_answers = 0
        self.judged: list[JudgedRequest] = []
        self.changed: list[ChangedOutcome] = []

    def add(self, line: int, request: LoggedRequest) -> None:
        """Judge the request of this line of the log."""
        outcome = outcome_of(self._policy, request, masks_prompts=self._masks_prompts)
        self.num_requests += 1
        self.num_answers += len(outcome.answers)
        effects = list(_effects(outcome))
        self._counts.update((rule, request.tenant, effect) for rule, effect in effects)
        if effects:
            self.judged.append(JudgedRequest(line, request.id, request.tenant, outcome))
        self.changed += _changes(line, request, outcome)

    @property
    def counts(self) -> list[EffectCount]:
        """By rule, tenant and effect; prompts and answers together."""
        rows = sorted(self._counts.items(), key=lambda row: (row[0][0], row[0][1], EFFECTS.index(row[0][2])))
        return [EffectCount(*key, count) for key, count in rows]


def _effects(outcome: RequestOutcome) -> Iterator[tuple[str, Effect]]:
    prompt = outcome.prompt
    if prompt.is_refused:
        yield prompt.refused_by or UNKNOWN_GUARDRAIL, "refused"
    for passage in prompt.masked:
        yield passage.rule, "masked"
    for name in prompt.flagged:
        yield name, "flagged"
    for answer in outcome.answers:
        if answer.cut_by:
            yield answer.cut_by, "cut"
        for name in answer.flagged:
            yield name, "flagged"


def _changes(line: int, request: LoggedRequest, outcome: RequestOutcome) -> Iterator[ChangedOutcome]:
    """The differences from what happened. Of answers that a refused prompt never had, nothing is said."""
    names = request.id, request.tenant
    was, becomes = _of_prompt(request.happened.refused), _of_prompt(outcome.prompt.is_refused)
    if was != becomes:
        yield ChangedOutcome(line, "prompt", was, becomes, *names)
    if request.happened.refused or outcome.prompt.is_refused:
        return
    cuts = request.happened.cut_at
    for choice, answer in enumerate(outcome.answers):
        cut_at = cuts[choice] if choice < len(cuts) else None
        if not answer.agrees_with(cut_at):
            was, becomes = _of_answer(cut_at), _of_answer(answer.cut_at)
            yield ChangedOutcome(line, "answer", was, becomes, *names, choice)


def _of_prompt(is_refused: bool) -> str:
    return "refused" if is_refused else "allowed"


def _of_answer(cut_at: int | None) -> str:
    return "whole" if cut_at is None else f"cut at {cut_at}"
