"""`kvloom safety whatif`: what a policy would have done with the requests of a log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import click
import msgspec
from rich.console import Console
from rich.table import Table

from safety_svc.policy import PolicyError, SafetyPolicy, load_policy
from safety_svc.whatif import LoggedRequest, unjudged_rules
from tools.failures import CommandError
from tools.options import option
from tools.safety.report import EFFECTS, PolicyReport

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
