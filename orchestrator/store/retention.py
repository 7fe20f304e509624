"""How long contents are kept at most: as a tenant has set it, and as the operator has bounded it."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from orchestrator.database.schema import objects

KIND: Final = "retention"
"""A tenant has one such object, whose label is the number of days."""
DAY_SECONDS: Final = 86_400.0
CONTENT_KINDS: Final = (
    *("response", "chat_completion", "conversation", "deleted_conversation", "feedback", "generation"),
    *("file", "upload", "upload_part", "batch"),
)
"""The kinds that have what users said and got. With a file, vector stores lose its chunks."""


def retention_id(tenant: str) -> str:
    """The id of a tenant's setting."""
    return f"{KIND}.{tenant}"


def is_too_old(max_days: int, now: float) -> sa.ColumnElement[bool]:
    """Holds for the objects that must not be kept any longer. `max_days`: the operator's bound; 0: there is none."""
    setting = objects.alias()
    kept_seconds = DAY_SECONDS * sa.cast(setting.c.label, sa.Double)
    is_late = sa.exists().where(
        setting.c.tenant == objects.c.tenant, setting.c.kind == KIND, objects.c.created_at <= now - kept_seconds
    )
    if max_days:
        is_late = sa.or_(is_late, objects.c.created_at <= now - max_days * DAY_SECONDS)
    return sa.and_(objects.c.kind.in_(CONTENT_KINDS), is_late)
