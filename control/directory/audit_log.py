"""The list of what was changed, by whom and when."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import audit
from control.directory.actor import Actor
from control.directory.pages import read_page
from kvloom.v1 import directory_service_pb2 as pb


async def list_(connection: AsyncConnection, actor: Actor, request: pb.ListAuditEntriesRequest) -> Any:
    query = sa.select(audit)
    if organisation := actor.scope(request.organisation):
        query = query.where(audit.c.organisation == organisation)
    if request.target:
        query = query.where(audit.c.target == request.target)
    rows, token = await read_page(connection, query, audit.c.number, request, descending=True)
    return pb.ListAuditEntriesResponse(entries=[_shown(row) for row in rows], next_page_token=token)


def _shown(row: sa.RowMapping) -> pb.AuditEntry:
    return pb.AuditEntry(
        number=row["number"],
        at=row["at"],
        actor=row["actor"],
        action=row["action"],
        target=row["target"],
        organisation=row["organisation"],
        before=_json(row["before"]),
        after=_json(row["after"]),
    )


def _json(value: Any) -> str:
    return "" if value is None else msgspec.json.encode(value).decode()
