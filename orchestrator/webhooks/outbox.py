"""Webhooks that are still to be sent: rows that are written in the transaction of what they tell of, so that nothing is
told that did not happen, and nothing is forgotten."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import sqlalchemy as sa
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom_common.database.database import Database
from orchestrator.database.schema import deliveries, jobs
from orchestrator.database.schema import objects as table
from orchestrator.seal import seal_of
from orchestrator.store import objects
from orchestrator.store.objects import as_json, new_id
from orchestrator.webhooks.endpoint import KIND, WebhookEndpoint

log = structlog.get_logger()

JOB: Final = "webhook"
MAX_WAITING: Final = 10_000
"""Messages that wait for one endpoint. It is not told of what happens beyond that."""
_FOREVER: Final = 0.0


class PendingWebhook(NamedTuple):
    id: str
    endpoint: WebhookEndpoint
    event: str
    body: bytes
    created_at: float
    num_tries: int


def event_body(event_id: str, event_type: str, object_id: str, now: float) -> bytes:
    """The message that an endpoint is sent."""
    return as_json(
        {"id": event_id, "object": "event", "created_at": int(now), "type": event_type, "data": {"id": object_id}}
    )


async def announce(connection: AsyncConnection, tenant: str, event_type: str, object_id: str, now: float) -> None:
    """Has those of the tenant's endpoints told that want to know, once the transaction is committed."""
    wanted = sa.select(table.c.id, table.c.body).where(table.c.tenant == tenant, table.c.kind == KIND)
    seal, rows = seal_of(connection), await connection.execute(wanted)
    found = [WebhookEndpoint.of(row.id, seal.opened(tenant, row.body)) for row in rows]
    told = [endpoint for endpoint in found if event_type in endpoint.event_types]
    if not told:
        return
    event_id = new_id("evt_")
    body = event_body(event_id, event_type, object_id, now)
    for endpoint in told:
        waiting = sa.select(sa.func.count()).where(deliveries.c.endpoint == endpoint.id)
        if (await connection.scalar(waiting) or 0) >= MAX_WAITING:
            log.warning("webhook_left_out", endpoint=endpoint.id, tenant=tenant, event_type=event_type)
            continue
        own = {"id": new_id("whd_"), "tenant": tenant, "created_at": now}
        row = {**own, "endpoint": endpoint.id, "event": event_id, "body": body, "num_tries": 0}
        await connection.execute(deliveries.insert().values(row))
        await connection.execute(jobs.insert().values(**own, key_id="", holder="", held_until=0.0, kind=JOB))


async def read(database: Database, job: Any) -> PendingWebhook | None:
    """None: the endpoint was deleted."""
    async with database.reading() as connection:
        row = (await connection.execute(sa.select(deliveries).where(deliveries.c.id == job.id))).one_or_none()
        if row is None:
            return None
        one = await objects.find(connection, row.tenant, KIND, row.endpoint, _FOREVER)
        if one is None:
            return None
        return PendingWebhook(row.id, WebhookEndpoint.read(one), row.event, row.body, row.created_at, row.num_tries)


async def finish(database: Database, delivery_id: str, sent_to: str = "") -> None:
    """Ends a delivery, and its job. `sent_to`: the endpoint that has taken it, whose others are then sent at once."""
    async with database.writing() as connection:
        await connection.execute(deliveries.delete().where(deliveries.c.id == delivery_id))
        await connection.execute(jobs.delete().where(jobs.c.id == delivery_id))
        if sent_to:
            await connection.execute(_waiting(sent_to).values(held_until=0.0))


async def put_off(database: Database, holder: str, delivery: PendingWebhook, until: float) -> None:
    """Has a delivery tried again, and not before then the others of its endpoint either."""
    own = sa.and_(jobs.c.id == delivery.id, jobs.c.holder == holder)
    async with database.writing() as connection:
        released = await connection.execute(jobs.update().where(own).values(holder="", held_until=until))
        if released.rowcount:
            tries = deliveries.update().where(deliveries.c.id == delivery.id)
            await connection.execute(tries.values(num_tries=delivery.num_tries + 1))
            others = _waiting(delivery.endpoint.id).where(jobs.c.held_until < until)
            await connection.execute(others.values(held_until=until))


def _waiting(endpoint_id: str) -> sa.Update:
    ids = sa.select(deliveries.c.id).where(deliveries.c.endpoint == endpoint_id)
    return jobs.update().where(jobs.c.id.in_(ids), jobs.c.holder == "")
