"""`kvloom safety whatif`: what a policy would have done with the requests of a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, Literal

import click
import msgspec
from rich.console import Console
from rich.table import Table

from safety_svc.policy import PolicyError, SafetyPolicy, load_policy
from safety_svc.whatif import LoggedRequest, RequestOutcome, outcome_of, unjudged_rules
from tools.failures import CommandError
from tools.options import option

MAX_SHOWN: Final = 20
"""How many differences are printed without --json."""


@click.command()
@option(
    "--policy",
    "policy_file",
    scope="safety",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The policy file.",
)
@option(
    "--log",
    "log_file",
    scope="safety",
    required=True,
    type=click.File("rb"),
    help="The recorded requests, one JSON object a line; - reads standard input.",
)
@option("--masks-prompts", is_flag=True, scope="safety", help="Edges hide what rules in mode mask find in prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with every outcome.")
def whatif(policy_file: Path, log_file: IO[bytes], masks_prompts: bool, as_json: bool) -> None:
    """Say which prompts of a log a policy would refuse, which answers it would cut and at which character, and what it
    would mask or flag, by rule and tenant, and compare that with what happened (docs/operate/safety.md). Nothing is
    sent anywhere: rules that ask others are named, and left out."""
    try:
        policy = load_policy(policy_file)
    except PolicyError as error:
        raise CommandError(str(error)) from error
    report = PolicyReport(policy, masks_prompts=masks_prompts)
    for line, request in _requests(log_file):
        report.add(line, request)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(_as_json(policy, report)), indent=2).decode())
    else:
        _print(policy, report)


def _requests(log_file: IO[bytes]) -> Iterator[tuple[int, LoggedRequest]]:
    decoder = msgspec.json.Decoder(LoggedRequest)
    for number, line in enumerate(log_file, 1):
        if line.strip():
            try:
                yield number, decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise CommandError(f"{log_file.name}, line {number}: {error}") from error


def _as_json(policy: SafetyPolicy, report: PolicyReport) -> dict[str, object]:
    return {
        "policy": policy.revision,
        "requests": report.num_requests,
        "answers": report.num_answers,
        "unjudged_rules": unjudged_rules(policy),
        "counts": report.counts,
        "outcomes": report.judged,
        "changes": report.changed,
    }


def _print(policy: SafetyPolicy, report: PolicyReport) -> None:
    console = Console(markup=False)
    console.print(
        f"policy {policy.revision}: {report.num_requests:,} requests, {report.num_answers:,} answers of allowed "
        f"prompts, {len(report.changed):,} differences from what happened",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("rule", "tenant", *EFFECTS, box=None)
    by_subject: dict[tuple[str, str], dict[str, int]] = {}
    for row in report.counts:
        by_subject.setdefault((row.rule, row.tenant), {})[row.effect] = row.count
    for (rule, tenant), counts in by_subject.items():
        table.add_row(rule, tenant or "-", *(str(counts.get(effect, 0)) for effect in EFFECTS))
    if by_subject:
        console.print(table)
    for change in report.changed[:MAX_SHOWN]:
        target = "prompt" if change.target == "prompt" else f"answer {change.choice}"
        console.print(
            f"line {change.line} {change.id or '-'}: {target} was {change.was}, becomes {change.becomes}",
            highlight=False,
            soft_wrap=True,
        )
    if len(report.changed) > MAX_SHOWN:
        console.print(f"... and {len(report.changed) - MAX_SHOWN:,} more (--json)", highlight=False)
    for name in unjudged_rules(policy):
        console.print(f"rule {name} asks another service, and was left out", highlight=False, soft_wrap=True)


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
