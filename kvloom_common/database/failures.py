"""Turns failures of the database into the error that a caller gets."""

from __future__ import annotations

from typing import Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason

log = structlog.get_logger()

DATABASE_ERRORS: Final = (SQLAlchemyError, OSError)
"""Transactions raise one of these. A server that does not answer is a TimeoutError, which is an OSError."""
NO_ANSWER: Final = "does not answer. A change that was asked for may still be made."
_IN_WORDS: Final = (
    # SQLite's messages, and PostgreSQL's codes.
    (("database is locked", "table is locked"), ("55P03",), "is locked by another process."),
    (("database or disk is full", "disk I/O error"), ("53100", "58030"), "has a disk that is full or fails."),
    (("malformed", "file is not a database"), ("XX001", "XX002"), "is damaged: restore a backup."),
    (("readonly database",), ("25006",), "takes no changes at the moment."),
)
_DATA_EXCEPTION: Final = "22"
"""The class of PostgreSQL's codes for values that it cannot store."""
RETRY_SECONDS: Final = 1.0
MAX_CAUSE_CHARS: Final = 300


class DatabaseAwayError(OSError):
    """There is no connection to the database's server."""


def database_error(
    method: str, error: Exception, reason: int = ErrorReason.ERROR_REASON_CONTROL_UNAVAILABLE, name: str = "of tenants"
) -> KvloomError:
    """The error for a caller, with this reason, about the database of that name. The log has the cause, which may
    contain names of tenants."""
    code = str(getattr(getattr(error, "orig", None), "sqlstate", None) or "")
    if code.startswith(_DATA_EXCEPTION):
        return invalid_argument("The database can store no such value.", "")
    words = _in_words(error, code)
    log.error(
        "database_failed",
        method=method,
        cause=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:MAX_CAUSE_CHARS],
        exc_info=None if words else error,  # only what is not understood: there may be many while a server is away
    )
    return KvloomError(
        reason,
        f"The database {name} {words or 'fails at the moment.'}",
        retry_after_seconds=RETRY_SECONDS,
    )


def _in_words(error: Exception, code: str) -> str:
    """ "" for what is not known."""
    if isinstance(error, TimeoutError):
        return NO_ANSWER
    shown = str(error)
    found = (words for texts, codes, words in _IN_WORDS if code in codes or any(text in shown for text in texts))
    away = "cannot be reached." if isinstance(error, OSError) or getattr(error, "connection_invalidated", False) else ""
    return next(found, away)
