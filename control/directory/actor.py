"""Who acts, and what they may see and change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason

ACTOR_METADATA: Final = "kvloom-actor"
ORGANISATION_METADATA: Final = "kvloom-actor-organisation"
MAX_ACTOR_CHARS: Final = 256


class Actor(msgspec.Struct, frozen=True):
    """The operator of the fabric, or an administrator of an organisation."""

    name: str
    """For the audit."""
    organisation: str | None = None
    """None: the operator's, who may do everything."""

    def require_operator(self, what: str) -> None:
        """Raises KvloomError (PERMISSION_DENIED) for others. `what` they would have changed."""
        if self.organisation is not None:
            message = f"Only the operator of the fabric may change {what}."
            raise KvloomError(ErrorReason.ERROR_REASON_PERMISSION_DENIED, message)

    def sees(self, organisation: str) -> bool:
        return self.organisation is None or self.organisation == organisation

    def require(self, organisation: str, kind: str, name: str) -> None:
        """Raises KvloomError (NOT_FOUND) if the thing belongs to an organisation that is not the actor's: whether it
        exists is not theirs to know."""
        if not self.sees(organisation):
            raise not_found(kind, name)

    def scope(self, organisation: str) -> str:
        """The organisation that a list is about; "": all. Raises KvloomError (NOT_FOUND) for that of others."""
        if organisation:
            self.require(organisation, "organisation", organisation)
        return organisation or self.organisation or ""


def actor_from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Actor:
    """Processes of the fabric say for whom they act; else it is the operator."""
    found = {key: value for key, value in metadata if isinstance(value, str)}
    return Actor(found.get(ACTOR_METADATA, "fabric")[:MAX_ACTOR_CHARS], found.get(ORGANISATION_METADATA))


def not_found(kind: str, name: str) -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, f"There is no {kind} {name[:256]!r}.")


def already_exists(kind: str, name: str) -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_ALREADY_EXISTS, f"The {kind} {name!r} exists already.")


def failed_precondition(message: str) -> KvloomError:
    return KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message)
