"""Seals what clients or the database keep for long, so that nobody else can read or alter it, by AES-256-GCM."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Any, Final

from kvloom_common.trust.seal import SealError

_SALT_BYTES: Final = 16
_NONCE: Final = bytes(12)
"""Each content has a key of its own, from the fabric's and a random salt, so that this repeats under no key."""


class StateSealer:
    """`opened` returns what another process of the fabric has sealed under the same name, at any time before."""

    def __init__(self, key: bytes) -> None:
        """`key`: see FabricTrust.state_key; without one, contents stay as they are."""
        self._key = key

    @property
    def has_key(self) -> bool:
        return bool(self._key)

    def seal(self, name: str, content: bytes) -> bytes:
        if not self._key:
            return content
        salt = os.urandom(_SALT_BYTES)
        return salt + self._cipher(salt).encrypt(_NONCE, content, name.encode())

    def opened(self, name: str, sealed: bytes) -> bytes:
        """Raises SealError, also if it was sealed under another name."""
        if not self._key:
            return sealed
        # Only here, because a fabric without a secret needs no cryptography.
        from cryptography.exceptions import InvalidTag

        salt = sealed[:_SALT_BYTES]
        if len(salt) < _SALT_BYTES:
            raise SealError("it is not sealed")
        try:
            return self._cipher(salt).decrypt(_NONCE, sealed[_SALT_BYTES:], name.encode())
        except (InvalidTag, ValueError) as error:
            raise SealError("it was altered, or sealed elsewhere or for somebody else") from error

    def _cipher(self, salt: bytes) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(hmac.digest(self._key, salt, hashlib.sha256))
