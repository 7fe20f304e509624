"""A tenant's retention: after how many days its contents are deleted."""

from __future__ import annotations

from typing import Any

from kvloom.errors import invalid_argument
from orchestrator.api.call import OperationCall, operation
from orchestrator.store import objects
from orchestrator.store.objects import StoredObject
from orchestrator.store.retention import KIND, retention_id


@operation("getRetention")
async def get(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        one = await objects.find(connection, call.tenant, KIND, retention_id(call.tenant), call.now)
    return _shown(call, None if one is None else int(one.label))


@operation("setRetention")
async def set_days(call: OperationCall) -> Any:
    """Raises KvloomError (INVALID_ARGUMENT) for more days than the operator allows."""
    days, most, own = call.body.get("days"), call.settings.retention_days, retention_id(call.tenant)
    if days is not None and most and days > most:
        raise invalid_argument(f"days must be at most {most} (orchestrator.retention_days).", "days")
    async with call.database.writing() as connection:
        await objects.delete(connection, [own])
        if days is not None:
            await objects.add(connection, call.tenant, KIND, StoredObject(own, call.now, None, "", str(days), {}))
    return _shown(call, days)


def _shown(call: OperationCall, days: int | None) -> dict[str, Any]:
    return {"object": "retention", "days": days, "max_days": call.settings.retention_days or None}
