"""The identity of one service, for machines that are trusted less than the rest of their fabric.

A process that has the fabric's secret can be any of its processes. An identity is made from the secret (`kvloom secret
issue`), and is one certificate with its key, and the keys that sign this service's own records in the registry. Who
steals it can be this service, and no other: it seals no journal, mints no usage, and calls no other process.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvloom_common.trust.certificates import ProcessCertificates, make_certificates
from kvloom_common.trust.roles import SAFETY, SHARD
from kvloom_common.trust.sealing import record_key
from kvloom_common.trust.secret import IDENTITY_FORMAT, FabricSecret, SecretError, read_private

_FORMAT: Final = f"{IDENTITY_FORMAT}:"
ISSUED_ROLES: Final = (SHARD, SAFETY)
"""Others sign usage or seal what clients may continue, and so need the secret."""
_MAX_FILE_BYTES: Final = 65_536


class ServiceIdentity(msgspec.Struct, frozen=True):
    """`str` of it, and its representation in tracebacks, reveal nothing."""

    fabric_id: str
    role: str
    name: str
    authorities: bytes
    """Those of all accepted secrets, in PEM, as the certificate and its key."""
    certificate: bytes
    key: bytes
    record_keys: dict[str, dict[str, bytes]]
    """By the name under which a record is stored, and by key id. The first is used, all are accepted."""

    def __repr__(self) -> str:
        return f"ServiceIdentity({self.role} {self.name!r})"

    @property
    def certificates(self) -> ProcessCertificates:
        return ProcessCertificates(self.authorities, self.certificate, self.key)

    def format(self) -> str:
        """The text form, which `parse` reads."""
        return _FORMAT + base64.b64encode(msgspec.json.encode(self)).decode()


def issue_identity(secret: FabricSecret, role: str, name: str, records: Sequence[str]) -> ServiceIdentity:
    """An identity for the service `name`. `records`: the names under which its records are stored. It ends when the
    secret that is used now is no longer accepted. Raises ValueError for a role that needs the secret."""
    if role not in ISSUED_ROLES:
        raise ValueError(f"{role} is not one of {', '.join(ISSUED_ROLES)}")
    made = make_certificates(secret, (role,), name)
    keys = {
        stored_under: {key_id: record_key(key, stored_under) for key_id, key in secret.keys("registry").items()}
        for stored_under in records
    }
    return ServiceIdentity(secret.fabric_id, role, name, made.authorities, made.certificate, made.key, keys)


def read_identity(path: Path) -> ServiceIdentity | None:
    """None if the file has something else, such as a secret. Raises SecretError, also when other users can read it."""
    text = read_private(path, _MAX_FILE_BYTES).strip()
    if not text.startswith(_FORMAT):
        return None
    try:
        content = base64.b64decode(text.removeprefix(_FORMAT), validate=True)
        return msgspec.json.decode(content, type=ServiceIdentity)
    except (binascii.Error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SecretError(f"{path} holds a damaged identity of a service") from error
