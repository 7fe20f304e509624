"""How what the fabric keeps in Redis is protected against others who can read or write there: registry records are
signed, journal entries are encrypted. Both are bound to the key that they are stored under."""

from __future__ import annotations

from typing import Protocol


class SealError(Exception):
    """The content was not sealed by this fabric; the message says why."""


class Sealer(Protocol):
    """Protects what is stored in Redis. `stored_under`: the Redis key."""

    def sign(self, stored_under: str, content: bytes) -> bytes:
        """Returns JSON that holds `content`, which is JSON."""
        ...

    def verified(self, stored_under: str, signed: bytes) -> bytes:
        """The content. Raises SealError."""
        ...

    def encrypt(self, stored_under: str, content: bytes) -> bytes: ...

    def decrypted(self, stored_under: str, encrypted: bytes) -> bytes:
        """Raises SealError."""
        ...


class NoSealer:
    """Stands in for Sealer in a fabric without a secret: everything is stored as it is."""

    def sign(self, stored_under: str, content: bytes) -> bytes:  # noqa: ARG002
        return content

    def verified(self, stored_under: str, signed: bytes) -> bytes:  # noqa: ARG002
        return signed

    def encrypt(self, stored_under: str, content: bytes) -> bytes:  # noqa: ARG002
        return content

    def decrypted(self, stored_under: str, encrypted: bytes) -> bytes:  # noqa: ARG002
        return encrypted


PLAIN = NoSealer()
