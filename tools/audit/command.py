"""The commands of `kvloom audit`."""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from kvloom_common.audit.keys import AuditKeys
from kvloom_common.audit.log import (
    KEYS,
    AuditLine,
    AuditLog,
    AuditRecord,
    BrokenChainError,
    Event,
    erase_excerpts,
    heads,
    read_log,
)
from kvloom_common.config import KvloomConfig
from tools.failures import CommandError
from tools.options import config_option, load_config_file, option


@click.command()
@config_option
def verify(config_file: Path | None) -> None:
    """Verify the chain of every file, and print its head. Keep the heads elsewhere, since lines that are missing at the
    end of a file show by comparing with them."""
    lines = list(audit_lines(audit_directory(config_file)))
    for name, (count, last) in heads(lines).items():
        print(f"{name} {count} {last}")
    print(f"verified {len(lines)} records")


@click.command()
@config_option
@option("--tenant", scope="audit", help="Only records of this tenant.")
@option("--rule", scope="audit", help="Only records of this rule.")
def show(config_file: Path | None, tenant: str | None, rule: str | None) -> None:
    """Print the records as JSON lines, with the excerpts whose keys there are."""
    directory = audit_directory(config_file)
    keys = AuditKeys(directory / KEYS)
    for line in audit_lines(directory):
        if tenant in (None, line.record.tenant) and rule in (None, line.record.rule):
            print(json.dumps(_shown(line, keys), ensure_ascii=False))


@click.command()
@config_option
@option("--tenant", scope="audit", required=True, help="The tenant whose records are wanted.")
@option("--out", scope="audit", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The new file.")
def export(config_file: Path | None, tenant: str, out: Path) -> None:
    """Write all that the log has of a tenant to a file, for the tenant."""
    directory = audit_directory(config_file)
    keys = AuditKeys(directory / KEYS)
    found = [_shown(line, keys) for line in audit_lines(directory) if line.record.tenant == tenant]
    try:
        with out.open("x", encoding="utf-8") as file:
            file.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in found)
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror}") from error
    print(f"exported {len(found)} records to {out}")


@click.command()
@config_option
@option("--tenant", scope="audit", required=True, help="The tenant whose excerpts are erased.")
@option("--user", scope="audit", help="Only those of this user (safety_identifier).")
def erase(config_file: Path | None, tenant: str, user: str | None) -> None:
    """Destroy the keys of a tenant's excerpts, which nobody can read any more. The chain still verifies."""
    directory = audit_directory(config_file)
    try:
        count = erase_excerpts(directory, "command", tenant, user)
    except OSError as error:
        raise CommandError(f"{directory}: {error.strerror}") from error
    print(f"erased the excerpts of {tenant}: {count} keys")


@click.command()
@config_option
@option("--tenant", scope="audit", help="Only decisions about this tenant's texts.")
def review(config_file: Path | None, tenant: str | None) -> None:
    """Print the decisions of rules in mode `review` that nobody has upheld or reversed, as JSON lines."""
    directory = audit_directory(config_file)
    keys, lines = AuditKeys(directory / KEYS), list(audit_lines(directory))
    decided = {line.record.about for line in lines}
    for line in lines:
        record = line.record
        if record.needs_review and line.hash not in decided and tenant in (None, record.tenant):
            print(json.dumps(_shown(line, keys), ensure_ascii=False))


@click.command()
@config_option
@click.argument("record_hash")
@option("--reason", scope="audit", required=True, help="The reason, which the log keeps.")
def uphold(config_file: Path | None, record_hash: str, reason: str) -> None:
    """Note that a decision was right. RECORD_HASH is the beginning of its hash, at least 8 characters."""
    _decide(audit_directory(config_file), record_hash, "upheld", reason)


@click.command()
@config_option
@click.argument("record_hash")
@option("--reason", scope="audit", required=True, help="The reason, which the log keeps.")
def reverse(config_file: Path | None, record_hash: str, reason: str) -> None:
    """Note that a decision was wrong. RECORD_HASH is the beginning of its hash, at least 8 characters."""
    _decide(audit_directory(config_file), record_hash, "reversed", reason)


def _decide(directory: Path, record_hash: str, event: Event, reason: str) -> None:
    """Raises CommandError."""
    line = decision_of(audit_lines(directory), record_hash)
    log = _writable(directory)
    try:
        log.append(event, tenant=line.record.tenant, rule=line.record.rule, reason=reason, about=line.hash)
    except OSError as error:
        raise CommandError(f"{directory}: {error.strerror}") from error
    finally:
        log.close()
    print(f"{event} {line.hash}")


@click.command()
@config_option
def abuse(config_file: Path | None) -> None:
    """Count findings by tenant, user (safety_identifier) and rule: of the last day, and a day in the week before."""
    rows = abuse_rows((line.record for line in audit_lines(audit_directory(config_file))), time.time())
    print("tenant\tsafety_identifier\trule\tlast_day\tper_day_before")
    for row in rows:
        print(f"{row.tenant}\t{row.safety_identifier}\t{row.rule}\t{row.num_last_day}\t{row.per_day_before:.1f}")


def decision_of(lines: Iterable[AuditLine], record_hash: str) -> AuditLine:
    """The one decision whose hash begins so. Raises CommandError."""
    found = [line for line in lines if len(record_hash) >= 8 and line.hash.startswith(record_hash)]
    if len(found) != 1 or found[0].record.event not in ("blocked", "flagged"):
        raise CommandError(f"{record_hash!r} is not the hash of one decision: there are {len(found)}")
    return found[0]


def audit_directory(config_file: Path | None) -> Path:
    return audit_directory_in(load_config_file(config_file))


def audit_directory_in(config: KvloomConfig) -> Path:
    """Raises CommandError."""
    directory = config.safety.audit_dir
    if not directory:
        raise CommandError("There is no audit log: safety.audit_dir is empty.")
    return Path(directory)


def _writable(directory: Path) -> AuditLog:
    try:
        return AuditLog(directory, "command")
    except OSError as error:
        raise CommandError(f"{directory} cannot be written: {error.strerror}") from error


def audit_lines(directory: Path) -> Iterator[AuditLine]:
    try:
        yield from read_log(directory)
    except BrokenChainError as error:
        print(f"BROKEN: {error}", file=sys.stderr)
        raise CommandError(f"The log was changed: {error}") from error
    except OSError as error:
        raise CommandError(f"{directory} cannot be read: {error.strerror}") from error


def _shown(line: AuditLine, keys: AuditKeys) -> dict[str, Any]:
    record = line.record
    at = datetime.datetime.fromtimestamp(record.at, datetime.UTC).isoformat(timespec="milliseconds")
    shown: dict[str, Any] = {"at": at, "event": record.event, "hash": line.hash}
    for field in ("target", "rule", "policy", "tenant", "safety_identifier", "request_id", "reason", "about"):
        if value := getattr(record, field):
            shown[field] = value
    if record.needs_review:
        shown["needs_review"] = True
    if record.position is not None:
        shown["position"] = record.position
    if record.excerpt:
        shown["excerpt"] = keys.open(record.excerpt, record.tenant, record.day, record.safety_identifier) or "(erased)"
    return shown


DAY_SECONDS: Final = 86_400.0
WEEK_DAYS: Final = 7


class AbuseRow(NamedTuple):
    tenant: str
    safety_identifier: str
    rule: str
    num_last_day: int
    per_day_before: float
    """The mean of the seven days before."""


def abuse_rows(records: Iterable[AuditRecord], now: float) -> list[AbuseRow]:
    """The rows, those with the most findings of the last day first. Decisions that were reversed count, too."""
    last: Counter[tuple[str, str, str]] = Counter()
    earlier: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        age_days = (now - record.at) / DAY_SECONDS
        if record.event in ("blocked", "flagged") and age_days < 1 + WEEK_DAYS:
            subject = record.tenant, record.safety_identifier, record.rule
            (last if age_days < 1 else earlier)[subject] += 1
    rows = [AbuseRow(*subject, last[subject], earlier[subject] / WEEK_DAYS) for subject in last | earlier]
    return sorted(rows, key=lambda row: (-row.num_last_day, row))
