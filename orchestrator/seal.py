"""Encrypts what is stored where edges hide personal data from models (edge.masks_prompts): the database has the texts
of clients, and answers as clients got them, and must not have them in clear.

Each tenant has a key of its own, which follows from the fabric's secret and does not change when the secret is rotated.
Bodies that were stored before are read as they are.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.database.database import Database

_MARK: Final = b"\x01"
"""A sealed body begins with it. Neither JSON nor what zlib makes does."""
_TEXT_MARK: Final = "\x01\x02sealed "
"""A sealed text begins with it."""
_NONCE_BYTES: Final = 12
_OPTION: Final = "kvloom_seal"


class BodySeal:
    """Seals bodies with AES-256-GCM."""

    def __init__(self, key: bytes = b"", *, seals: bool = False) -> None:
        """`key` follows from the fabric's secret. Without `seals`, bodies are stored in clear."""
        self._key = key
        self.seals = seals

    def sealed(self, tenant: str, body: bytes) -> bytes:
        """Return the form in which a body of that tenant is stored."""
        if not self.seals:
            return body
        nonce = os.urandom(_NONCE_BYTES)
        return _MARK + nonce + self._cipher(tenant).encrypt(nonce, body, None)

    def opened(self, tenant: str, stored: bytes) -> bytes:
        """The body. Raises KvloomError (FAILED_PRECONDITION) if it was sealed with another fabric's secret, or for
        another tenant."""
        if not stored.startswith(_MARK):
            return stored
        nonce, sealed = stored[1 : 1 + _NONCE_BYTES], stored[1 + _NONCE_BYTES :]
        try:
            return self._cipher(tenant).decrypt(nonce, sealed, None)
        except (InvalidTag, ValueError) as error:
            message = "This object was encrypted with the secret of another fabric, and cannot be read."
            raise KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message) from error

    def sealed_text(self, tenant: str, text: str) -> str:
        """Do what `sealed` does, for a column of texts."""
        return _TEXT_MARK + base64.b64encode(self.sealed(tenant, text.encode())).decode() if self.seals else text

    def opened_text(self, tenant: str, stored: str) -> str:
        """Do what `opened` does."""
        if not stored.startswith(_TEXT_MARK):
            return stored
        return self.opened(tenant, base64.b64decode(stored[len(_TEXT_MARK) :])).decode()

    def tenant_key(self, tenant: str, purpose: str) -> bytes:
        """The tenant's key for one purpose."""
        about = f"kvloom stored {purpose}\0{tenant}".encode("utf-8", "surrogateescape")
        return hmac.digest(self._key, about, hashlib.sha256)

    def _cipher(self, tenant: str) -> AESGCM:
        return AESGCM(self.tenant_key(tenant, "bodies"))


NO_SEAL: Final = BodySeal()


def use_seal(database: Database, seal: BodySeal) -> None:
    """From now on the bodies of that database are sealed so."""
    database.engine.update_execution_options(**{_OPTION: seal})


def seal_of(connection: AsyncConnection) -> BodySeal:
    """The seal of the connection's database."""
    return connection.engine.get_execution_options().get(_OPTION, NO_SEAL)
