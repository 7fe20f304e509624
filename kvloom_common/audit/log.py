"""The records of the audit log: JSON lines, each of which holds the hash of the line before it.

A line that was changed, removed or put in between breaks the chain at the next one. Lines that are missing at the end,
or a file that is missing as a whole, are noticed by comparing with the heads that `kvloom audit verify` has printed
before. Every service process writes a file of its own.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from kvloom_common.audit.keys import AuditKeys, Retention
from kvloom_common.private_file import make_private_folder, open_private_file

KEYS: Final = "keys"
"""The directory of the keys, within that of the log."""
FOREVER: Final = Retention()
FIRST: Final = "0" * 64
"""The hash before the first record of a file."""
Event = Literal["blocked", "flagged", "computed", "erased", "upheld", "reversed"]


class AnswerProof(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The digest of an answer, and all that it follows from but the prompt, with which it can be computed again. There
    is no text in it."""

    model: str
    weights_checksum: str
    engine_variant: str
    """See Receipt (kvloom_common/receipts/receipt.py), as for the other fields."""
    request_digest: str
    output_digest: str
    """The digest of [index, tokens that the client has] of each choice."""
    num_output_tokens: list[int]
    """The number of these tokens, by choice."""
    request: dict[str, Any]
    """The RequestedGeneration without its prompt and without other texts of the client, such as stop strings."""
    adapter: str = ""
    adapter_checksum: str = ""


def digest_of_output(output: Iterable[tuple[int, Sequence[int]]]) -> str:
    """AnswerProof.output_digest of choices: their indexes and tokens."""
    return hashlib.sha256(msgspec.json.encode([[index, list(token_ids)] for index, token_ids in output])).hexdigest()


class AuditRecord(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line."""

    number: int
    """The number within the file, from 1 on."""
    at: float
    """Seconds since 1970."""
    event: Event
    before: str
    """The hash of the line before it."""
    target: str = ""
    """Says if a prompt or an answer was judged."""
    rule: str = ""
    policy: str = ""
    """The revision of the policy."""
    tenant: str = ""
    safety_identifier: str = ""
    request_id: str = ""
    position: int | None = None
    """Where the passage begins, in characters; None: that is not known."""
    needs_review: bool = False
    """A person is to decide about it: see the records that are `about` it."""
    excerpt: str = ""
    """The passage with the text around it, or the AnswerProof of an answer (`computed`), encrypted; "" if there is
    neither."""
    reason: str = ""
    """The reason why a decision was upheld or reversed."""
    about: str = ""
    """The hash of that decision's record."""

    @property
    def day(self) -> datetime.date:
        return datetime.datetime.fromtimestamp(self.at, datetime.UTC).date()


@dataclasses.dataclass(frozen=True, slots=True)
class AuditLine:
    """A record that was read, and its hash."""

    path: Path
    record: AuditRecord
    hash: str


class BrokenChainError(Exception):
    """A file was changed. The message names the file and the line."""


def hash_of(line: bytes) -> str:
    """Return the hash of a line without its end."""
    return hashlib.sha256(line).hexdigest()


class AuditLog:
    """One file that is being written. Records are written before the verdict is sent."""

    def __init__(self, directory: Path, name: str, retention: Retention = FOREVER) -> None:
        """`name` is the process's. `retention`: keys of older excerpts are destroyed. Raises OSError."""
        make_private_folder(directory)
        self.keys = AuditKeys(directory / KEYS)
        self._retention = retention
        self._expired_on: datetime.date | None = None
        path = directory / f"{name}-{time.time_ns()}-{os.getpid()}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = os.fdopen(open_private_file(path, flags), "ab", buffering=0)
        self._number = 0
        self._before: str = FIRST

    def close(self) -> None:
        self._file.close()

    def append(self, event: Event, excerpt: str = "", **fields: Any) -> str:
        """Write a record, whose other fields are those of AuditRecord, and return its hash. Raises OSError."""
        now = time.time()
        record = AuditRecord(self._number + 1, now, event, self._before, **fields)
        if excerpt:
            sealed = self.keys.seal(excerpt, record.tenant, record.day, record.safety_identifier)
            record = msgspec.structs.replace(record, excerpt=sealed)
        line = msgspec.json.encode(record)
        self._file.write(line + b"\n")
        self._number, self._before = record.number, hash_of(line)
        if self._retention and self._expired_on != record.day:
            self._expired_on = record.day
            self.keys.expire(record.day, self._retention)
        return self._before


def erase_excerpts(directory: Path, name: str, tenant: str, user: str | None = None) -> int:
    """Destroy the keys of a tenant's excerpts, or of those of one user (`safety_identifier`), and note it. Returns how
    many there were. `name`: see AuditLog. Raises OSError."""
    log = AuditLog(directory, name)
    try:
        count = log.keys.erase(tenant, user)
        log.append("erased", tenant=tenant, reason="" if user is None else "one user")
    finally:
        log.close()
    return count


def read_log(directory: Path) -> Iterator[AuditLine]:
    """Read all files, verifying them. Raises BrokenChainError, OSError."""
    for path in sorted(directory.glob("*.jsonl")):
        before, number = FIRST, 0
        with path.open("rb") as file:
            for raw in file:
                number += 1
                line = raw.removesuffix(b"\n")
                try:
                    record = msgspec.json.decode(line, type=AuditRecord)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise BrokenChainError(f"{path}, line {number}: {error}") from error
                if (record.before, record.number) != (before, number):
                    raise BrokenChainError(f"{path}, line {number}: it does not follow on the line before it")
                before = hash_of(line)
                yield AuditLine(path, record, before)


def heads(lines: Sequence[AuditLine]) -> dict[str, tuple[int, str]]:
    """By file, the number of its records and the last hash."""
    return {line.path.name: (line.record.number, line.hash) for line in lines}
