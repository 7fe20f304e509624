"""Encrypts what is stored where edges hide personal data from models (edge.masks_prompts): the database has the texts
of clients, and answers as clients got them, and must not have them in clear.

Keys follow from the fabric's secret, do not change when it is rotated, and differ for each body, which only its tenant
opens. Bodies that were stored before are read as they are.
"""

from __future__ import annotations

import base64
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.database.database import Database
from kvloom_common.trust.seal import SealError
from kvloom_common.trust.state_seal import StateSealer

_MARK: Final = b"\x01"
"""A sealed body begins with it. Neither JSON nor what zlib makes does."""
_TEXT_MARK: Final = "\x01\x02sealed "
"""A sealed text begins with it."""
_OPTION: Final = "kvloom_seal"


class BodySeal:
    """Seals the bodies of tenants."""

    def __init__(self, sealer: StateSealer, *, seals: bool = False) -> None:
        """Without `seals`, bodies are stored in clear."""
        self._sealer = sealer
        self.seals = seals

    def sealed(self, tenant: str, body: bytes) -> bytes:
        """Return the form in which a body of that tenant is stored."""
        return _MARK + self.sealed_part(tenant, "", body) if self.seals else body

    def opened(self, tenant: str, stored: bytes) -> bytes:
        """The body. Raises KvloomError (FAILED_PRECONDITION) if it was sealed by another fabric, or for another
        tenant."""
        return self.opened_part(tenant, "", stored[len(_MARK) :]) if stored.startswith(_MARK) else stored

    def sealed_text(self, tenant: str, text: str) -> str:
        """Do what `sealed` does, for a column of texts."""
        return _TEXT_MARK + base64.b64encode(self.sealed(tenant, text.encode())).decode() if self.seals else text

    def opened_text(self, tenant: str, stored: str) -> str:
        """Do what `opened` does."""
        if not stored.startswith(_TEXT_MARK):
            return stored
        return self.opened(tenant, base64.b64decode(stored[len(_TEXT_MARK) :])).decode()

    def sealed_part(self, tenant: str, name: str, part: bytes) -> bytes:
        """Seal a part of what is known to be sealed, by its name."""
        return self._sealer.seal(_about(tenant, name), part)

    def opened_part(self, tenant: str, name: str, stored: bytes) -> bytes:
        """Raises KvloomError (FAILED_PRECONDITION)."""
        message = "This was encrypted with the secret of another fabric, or changed, and cannot be read."
        unreadable = KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message)
        if not self._sealer.has_key:
            raise unreadable
        try:
            return self._sealer.opened(_about(tenant, name), stored)
        except SealError as error:
            raise unreadable from error


NO_SEAL: Final = BodySeal(StateSealer(b""))


def use_seal(database: Database, seal: BodySeal) -> None:
    """From now on the bodies of that database are sealed so."""
    database.engine.update_execution_options(**{_OPTION: seal})


def seal_of(connection: AsyncConnection) -> BodySeal:
    """The seal of the connection's database."""
    return connection.engine.get_execution_options().get(_OPTION, NO_SEAL)


def _about(tenant: str, name: str) -> str:
    return f"stored body\0{tenant}\0{name}"
