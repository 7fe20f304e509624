"""The stream of usage records in Redis, from routers to the control service.

An entry has some consecutive records of one producer, or says that a producer has ended. Control removes an entry once
its records are in the database, and says in a hash up to which number it has all records of a producer. So a router
that does not find its entry, although the hash does not cover it, knows that Redis has lost it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kvloom_common.tenancy.usage_record import UsageRecord
from kvloom_common.trust.seal import Sealer, SealError

GROUP: Final = "control"
ENTRY_FIELD: Final = b"entry"


class UsageEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the stream."""

    producer: str
    records: tuple[UsageRecord, ...] = ()
    closed_after: int | None = None
    """The producer has ended, and this is the number of its last record. None: it may still run."""


class Stored(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a producer that control announces."""

    number: int = 0
    """The database has all its records up to this one."""
    is_closed: bool = False
    """The producer has ended, all its records are in the database, and its leases are closed."""


NOTHING_STORED: Final = Stored()


def stream_key(key_prefix: str) -> str:
    return f"{key_prefix}:{{usage}}:records"


def stored_key(key_prefix: str) -> str:
    """The hash: producer → Stored."""
    return f"{key_prefix}:{{usage}}:stored"


class _EncodedEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    producer: str
    records: Sequence[msgspec.Raw] = ()
    closed_after: int | None = None


class UsageStream:
    """How both sides write what they write. All of it is signed with the fabric's secret, if it has one."""

    def __init__(self, key_prefix: str, sealer: Sealer) -> None:
        self.stream = stream_key(key_prefix)
        self.stored = stored_key(key_prefix)
        self._sealer = sealer

    def entry(self, producer: str, records: Sequence[bytes], closed_after: int | None = None) -> dict[bytes, bytes]:
        """The fields of an entry. `records` are JSON."""
        entry = _EncodedEntry(producer, [msgspec.Raw(record) for record in records], closed_after)
        return {ENTRY_FIELD: self._sealer.sign(self.stream, msgspec.json.encode(entry))}

    def decoded(self, fields: Mapping[bytes, bytes]) -> UsageEntry:
        """Raises ValueError for an entry that this fabric has not made."""
        try:
            content = self._sealer.verified(self.stream, fields[ENTRY_FIELD])
            return msgspec.json.decode(content, type=UsageEntry)
        except (KeyError, SealError, msgspec.DecodeError) as error:
            raise ValueError(f"not an entry of this fabric: {error}") from error

    def stored_value(self, producer: str, stored: Stored) -> bytes:
        """Signed for this producer: to another one, it would say that records are stored which are not."""
        return self._sealer.sign(f"{self.stored}:{producer}", msgspec.json.encode(stored))

    def read_stored(self, producer: str, value: bytes | str | None) -> Stored:
        """Nothing, and what this fabric has not written of this producer, is as good as knowing nothing."""
        if not isinstance(value, bytes):
            return NOTHING_STORED
        try:
            return msgspec.json.decode(self._sealer.verified(f"{self.stored}:{producer}", value), type=Stored)
        except (SealError, msgspec.DecodeError):
            return NOTHING_STORED
