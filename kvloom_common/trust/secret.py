"""The secret that all processes of a fabric share (docs/operate/security.md, ADR 19).

It is one line of text, in a file of mode 0600 or in the environment variable KVLOOM_FABRIC_SECRET:

    kvloom1:<identity>:<secret>[,<secret>...]

Each part is 32 random bytes in URL-safe base64. The first secret is the one that a process proves itself with; the
others are accepted as well, so that a rotation (`rotated`) passes through states in which all processes understand one
another. The identity never changes: it tells fabrics apart.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Final

from kvloom_common.private_file import OTHERS, make_private_folder, write_private_file

ENVIRONMENT_VARIABLE: Final = "KVLOOM_FABRIC_SECRET"
_FORMAT: Final = "kvloom1"
IDENTITY_FORMAT: Final = "kvloom-identity1"
"""How an identity of a service begins (kvloom_common/trust/identity.py)."""
_BYTES: Final = 32
_MAX_SECRETS: Final = 4
_MAX_FILE_BYTES: Final = 4096


class SecretError(Exception):
    """The secret cannot be used. The message names its source and the fault, never the secret."""


@dataclasses.dataclass(frozen=True)
class FabricSecret:
    """`str` of it, and its representation in tracebacks, reveal nothing."""

    identity: bytes = dataclasses.field(repr=False)
    secrets: tuple[bytes, ...] = dataclasses.field(repr=False)
    """The first proves, all are accepted."""

    @classmethod
    def draw(cls) -> FabricSecret:
        return cls(secrets.token_bytes(_BYTES), (secrets.token_bytes(_BYTES),))

    @classmethod
    def parse(cls, text: str, source: str) -> FabricSecret:
        """Raises SecretError, whose message names `source`."""
        parts = text.strip().split(":")
        if parts[0] == IDENTITY_FORMAT:
            raise SecretError(f"{source} holds the identity of one service, and this needs the fabric's secret")
        if len(parts) != 3 or parts[0] != _FORMAT:
            raise SecretError(f"{source} holds no secret of a fabric (`kvloom secret new` prints one)")
        try:
            identity, *found = (_decoded(part) for part in (parts[1], *parts[2].split(",")))
        except ValueError as error:
            raise SecretError(
                f"{source} holds a damaged secret: a part of it is not {_BYTES} bytes in base64"
            ) from error
        if len(found) > _MAX_SECRETS:
            raise SecretError(f"{source} holds {len(found)} secrets; at most {_MAX_SECRETS} are allowed")
        return cls(identity, tuple(found))

    @property
    def fabric_id(self) -> str:
        """Tells fabrics apart. It is no secret."""
        return hmac.digest(self.identity, b"kvloom fabric id", hashlib.sha256).hex()[:16]

    @property
    def caller_key(self) -> bytes:
        """The key for kvloom_common.callers.Callers. A rotation does not change it, so that callers keep their
        names."""
        return hmac.digest(self.identity, b"kvloom callers", hashlib.sha256)

    @property
    def cache_key(self) -> bytes:
        """The key for kvloom_common.access.kv_shares.CacheSalts. A rotation does not change it either, so that what
        is cached is found again."""
        return hmac.digest(self.identity, b"kvloom cache salts", hashlib.sha256)

    @property
    def state_key(self) -> bytes:
        """The key for kvloom_common.trust.state_seal.StateSealer. A rotation does not change it either, since what is
        stored outlives many."""
        return hmac.digest(self.identity, b"kvloom stored state", hashlib.sha256)

    def keys(self, purpose: str) -> dict[str, bytes]:
        """The keys for one purpose (32 bytes), by key id. The first is used, all are accepted."""
        return {key_id(secret): hmac.digest(secret, f"kvloom {purpose}".encode(), "sha256") for secret in self.secrets}

    def format(self) -> str:
        """The text form, which `parse` reads."""
        return f"{_FORMAT}:{_encoded(self.identity)}:{','.join(map(_encoded, self.secrets))}"

    # -- rotation: each step must have reached all processes before the next one begins --------------------------------

    def with_accepted(self, secret: bytes) -> FabricSecret:
        """Step 1: `secret` is accepted, but not used yet."""
        return FabricSecret(self.identity, (*self.secrets, secret)[-_MAX_SECRETS:])

    def with_used(self, secret: bytes) -> FabricSecret:
        """Step 2: `secret` is used, and what was made with the others is still accepted."""
        return FabricSecret(self.identity, (secret, *(other for other in self.secrets if other != secret)))

    def without_others(self) -> FabricSecret:
        """Step 3: only the secret that is used is accepted."""
        return FabricSecret(self.identity, self.secrets[:1])


def key_id(secret: bytes) -> str:
    """Names a secret without revealing it."""
    return hmac.digest(secret, b"kvloom key id", "sha256").hex()[:8]


def read_secret(path: Path) -> FabricSecret:
    """Raises SecretError, also when other users can read the file."""
    return FabricSecret.parse(read_private(path, _MAX_FILE_BYTES), str(path))


def read_private(path: Path, max_bytes: int) -> str:
    """Return the beginning of the file. Raises SecretError, also when other users can read it."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(max_bytes)
    except OSError as error:
        raise SecretError(f"the fabric's secret {path} cannot be read: {error.strerror}") from error
    if mode & OTHERS:
        raise SecretError(f"other users may read the fabric's secret {path}: run `chmod 600 {path}`")
    return content.decode("ascii", "replace")


def write_secret(path: Path, secret: FabricSecret) -> None:
    """Replace the file atomically, readable for this user alone. Raises OSError."""
    make_private_folder(path.parent)
    write_private_file(path, secret.format().encode() + b"\n")


def made_or_read(path: Path) -> FabricSecret:
    """The secret in the file, which is made if it is missing. Raises SecretError."""
    if not path.exists():
        try:
            write_secret(path, FabricSecret.draw())
        except OSError as error:
            raise SecretError(f"the fabric's secret {path} cannot be written: {error.strerror}") from error
    return read_secret(path)


def _encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).decode().rstrip("=")


def _decoded(part: str) -> bytes:
    found = base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
    if len(found) != _BYTES:
        raise ValueError("wrong length")
    return found
