"""Says what a policy does with recorded texts: which prompts it refuses, and which answers it cuts, and where.

The gate is a function of the texts and of the parts in which they come. Recorded texts are judged here by the code that
judges them in the service (screen.py), so the outcome is that of the service under the same policy. How many characters
of an answer are shown before a passage may depend on the parts, since each rule withholds what may still become one:
`cut_at` holds for the recorded parts, `least_cut_at` and `most_cut_at` for any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from safety_svc.connection import prompt_judge
from safety_svc.masks import HiddenPassage, hidden_passages
from safety_svc.policy import Hit, SafetyPolicy
from safety_svc.rule_modes import Scope, UnknownGuardrailError
from safety_svc.rule_plugins import RuleFailedError
from safety_svc.screen import AnswerScreener, check_prompt


class SeenByClient(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a recorded request, as its client saw it."""

    refused: bool = False
    cut_at: tuple[int | None, ...] = ()
    """By answer, how many characters were shown of one that was cut; None: it was not cut."""


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the log."""

    id: str = ""
    tenant: str = ""
    guardrails: tuple[str, ...] = ()
    prompt: str = ""
    """The text that the model read."""
    answers: tuple[str | tuple[str, ...], ...] = ()
    """By choice, the text that the model wrote: its parts, as they came, or all of it."""
    happened: SeenByClient = SeenByClient()


class PromptOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A policy's verdict on a prompt."""

    refused_by: str = ""
    """The rule; "": it is allowed."""
    found_at: int | None = None
    """Where the passage begins, in the text with the names of rules in place of what is masked."""
    rule_failed: bool = False
    """The rule could not be applied, and that refuses the prompt."""
    masked: tuple[HiddenPassage, ...] = ()
    flagged: tuple[str, ...] = ()
    """The rules that only note what they find, and have found something."""
    unknown_guardrail: str = ""
    """The request names this guardrail, which its tenant may not use or which does not exist, and is refused."""

    @property
    def is_refused(self) -> bool:
        return bool(self.refused_by or self.unknown_guardrail)


class AnswerOutcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A policy's verdict on an answer."""

    cut_by: str = ""
    """The rule; "": all of it is shown."""
    cut_at: int | None = None
    """How many characters are shown of an answer that is cut, if the service gets the recorded parts."""
    least_cut_at: int | None = None
    """How many are shown at least, whatever the parts."""
    most_cut_at: int | None = None
    """How many are shown at most, whatever the parts; None for a rule in mode async, which lets everything pass until
    its verdict."""
    rule_failed: bool = False
    flagged: tuple[str, ...] = ()

    def agrees_with(self, cut_at: int | None) -> bool:
        """True if an answer that was cut there (None: not cut) is one of this outcome."""
        if cut_at is None or self.least_cut_at is None:
            return cut_at is self.least_cut_at
        return self.least_cut_at <= cut_at and (self.most_cut_at is None or cut_at <= self.most_cut_at)


class RequestOutcome(msgspec.Struct, frozen=True):
    """A policy's verdicts on a request."""

    prompt: PromptOutcome
    answers: tuple[AnswerOutcome, ...] = ()
    """Empty when the prompt is refused."""


def outcome_of(policy: SafetyPolicy, request: LoggedRequest, *, masks_prompts: bool = False) -> RequestOutcome:
    """Judge a recorded request. `masks_prompts`: rules in mode mask hide what they find in the prompt, as with
    `edge.masks_prompts`; otherwise they refuse it."""
    try:
        policy.scopes.check(request.tenant, request.guardrails)
    except UnknownGuardrailError as error:
        return RequestOutcome(PromptOutcome(unknown_guardrail=str(error)))
    prompt = _prompt_outcome(policy, request, masks_prompts=masks_prompts)
    if prompt.is_refused:
        return RequestOutcome(prompt)
    scope = policy.scopes.of(request.tenant, request.guardrails)
    return RequestOutcome(prompt, tuple(_answer_outcome(policy, scope, parts) for parts in request.answers))


def unjudged_rules(policy: SafetyPolicy) -> Sequence[str]:
    """The rules that ask somebody else, and of which a log tells nothing."""
    judged = {found.rule.name for found in (*policy.any_text.phrases, *policy.any_text.patterns)}
    return [name for name in policy.scopes.names if name not in judged]


def _prompt_outcome(policy: SafetyPolicy, request: LoggedRequest, *, masks_prompts: bool) -> PromptOutcome:
    text: str = request.prompt
    hidden: tuple[HiddenPassage, ...] = ()
    if masks_prompts:
        try:
            hidden = tuple(hidden_passages(policy, text, request.tenant, request.guardrails))
        except RuleFailedError:
            return PromptOutcome(refused_by="(a rule in mode mask)", rule_failed=True)
        for passage in reversed(hidden):
            text = f"{text[: passage.start]}[{passage.rule}]{text[passage.end :]}"
    judge = prompt_judge(policy, request.tenant, request.guardrails)
    hit = check_prompt(policy.prompt, text, judge)
    flagged = tuple(judge.flagged)
    if hit is None or _is_left_out(hit):
        return PromptOutcome(masked=hidden, flagged=flagged)
    return PromptOutcome(
        refused_by=hit.rule.name, found_at=hit.start, rule_failed=hit.is_failure, masked=hidden, flagged=flagged
    )


def _is_left_out(hit: Hit) -> bool:
    """True when the rule could not be applied, and such texts are shown without it."""
    return hit.is_failure and hit.rule.on_failure == "allow"


def _answer_outcome(policy: SafetyPolicy, scope: Scope, recorded: str | Sequence[str]) -> AnswerOutcome:
    parts = (recorded,) if isinstance(recorded, str) else recorded
    screener, num_chars = _screened(policy, scope, parts)
    hit, flagged = screener.hit, tuple(screener.flagged)
    if hit is None or _is_left_out(hit):
        return AnswerOutcome(flagged=flagged)
    first, _ = _screened(policy, scope, "".join(parts))
    assert first.hit is not None
    is_shown_at_once = any(scope.modes.get(each.rule.name) == "async" for each in (hit, first.hit))
    return AnswerOutcome(
        cut_by=hit.rule.name,
        cut_at=num_chars if scope.modes.get(hit.rule.name) == "async" else screener.num_clear_chars,
        least_cut_at=first.num_clear_chars,
        most_cut_at=None if is_shown_at_once else first.hit.start,
        rule_failed=hit.is_failure,
        flagged=flagged,
    )


def _screened(policy: SafetyPolicy, scope: Scope, parts: Iterable[str]) -> tuple[AnswerScreener, int]:
    """Returns the screener after the last part or the first passage, and how many characters it got. A text as a whole
    is an iterable of single characters: those are the parts with which a passage is found first."""
    screener = AnswerScreener(policy.answer, policy.watched_answer, scope)
    num_chars = 0
    for part in parts:
        num_chars += len(part)
        screener.push(part)
        if screener.hit is not None:
            return screener, num_chars
    screener.close()
    return screener, num_chars
