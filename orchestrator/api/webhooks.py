"""Webhook endpoints: how they are made, found, changed and tried."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.trust.seal import SealError
from kvloom_common.webhook_events import WEBHOOK_EVENTS
from orchestrator.api.call import OperationCall, operation, quota_reached
from orchestrator.store import objects
from orchestrator.store.objects import StoredObject, new_id
from orchestrator.store.pages import as_list, page_of
from orchestrator.webhooks.caller import NotSentError, send
from orchestrator.webhooks.endpoint import KIND, WebhookEndpoint, check_url, is_private_host
from orchestrator.webhooks.outbox import event_body

MAX_ENDPOINTS: Final = 20
"""That a tenant may have."""


def shown(one: StoredObject, secret: str = "") -> dict[str, Any]:
    endpoint = WebhookEndpoint.read(one)
    return {
        "id": one.id,
        "object": "webhook_endpoint",
        "created_at": int(one.created_at),
        "updated_at": endpoint.updated_at,
        "name": endpoint.name,
        "url": endpoint.url,
        "event_types": endpoint.event_types,
        "signing_secret_hint": endpoint.hint,
        **({"signing_secret": secret} if secret else {}),
    }


@operation("createWebhookEndpoint")
async def create(call: OperationCall) -> Any:
    if not call.sealer.has_key:
        message = "Webhooks need the fabric's secret (fabric.secret_file)."
        raise KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message)
    given = call.body
    check_url(given["url"], call.settings.webhook_private_hosts)
    endpoint = WebhookEndpoint(
        id=new_id("we_"),
        name=given["name"],
        url=given["url"],
        event_types=sorted(set(given["event_types"])),
        updated_at=int(call.now),
        secret=b"",
        hint="",
    )
    endpoint, secret = endpoint.with_secret(call.sealer, call.now, keeps_old=False)
    one = StoredObject(endpoint.id, call.now, None, "", "", endpoint.body())
    async with call.database.writing() as connection:
        if await objects.count(connection, call.tenant, KIND, call.now) >= MAX_ENDPOINTS:
            raise quota_reached(f"There are {MAX_ENDPOINTS} webhook endpoints already.")
        await objects.add(connection, call.tenant, KIND, one)
    return shown(one, secret)


@operation("listWebhookEndpoints")
async def list_endpoints(call: OperationCall) -> Any:
    page = page_of(call.query)
    async with call.database.reading() as connection:
        found, has_more = await objects.listed(connection, call.tenant, KIND, page, call.now)
    return as_list([shown(one) for one in found], has_more=has_more)


@operation("getWebhookEndpoint")
async def get(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        return shown(await _found(connection, call))


@operation("updateWebhookEndpoint")
async def update(call: OperationCall) -> Any:
    given = {name: value for name, value in call.body.items() if value is not None}
    if "url" in given:
        check_url(given["url"], call.settings.webhook_private_hosts)
    if "event_types" in given:
        given["event_types"] = sorted(set(given["event_types"]))
    async with call.database.writing() as connection:
        one = await _found(connection, call, for_update=True)
        endpoint = WebhookEndpoint.read(one)
        changed = msgspec.structs.replace(endpoint, **given)
        if changed != endpoint:
            changed = msgspec.structs.replace(changed, updated_at=int(call.now))
            one = one._replace(body=changed.body())
            await objects.change(connection, call.tenant, one.id, one.body)
    return shown(one)


@operation("rotateWebhookSecret")
async def rotate_secret(call: OperationCall) -> Any:
    keeps_old = bool(call.body.get("keep_old_secret_active_for_24_hours"))
    async with call.database.writing() as connection:
        one = await _found(connection, call, for_update=True)
        endpoint, secret = WebhookEndpoint.read(one).with_secret(call.sealer, call.now, keeps_old=keeps_old)
        one = one._replace(body=endpoint.body())
        await objects.change(connection, call.tenant, one.id, one.body)
    return shown(one, secret)


@operation("testWebhookEndpoint")
async def test(call: OperationCall) -> Any:
    async with call.database.reading() as connection:
        endpoint = WebhookEndpoint.read(await _found(connection, call))
    event_type = call.body["event_type"]
    event_id = new_id("evt_")
    kind = "resp" if event_type.startswith("response.") else "batch"
    body = event_body(event_id, event_type, f"{kind}_test", call.now)
    is_private = is_private_host(endpoint.url, call.settings.webhook_private_hosts)
    try:
        secrets = endpoint.secrets(call.sealer, call.now)
        status = await send(endpoint.url, event_id, body, secrets, may_be_private=is_private)
    except (NotSentError, SealError) as error:
        message = f"The endpoint could not be tested: {error}."
        raise KvloomError(ErrorReason.ERROR_REASON_FAILED_PRECONDITION, message) from error
    return {
        "object": "webhook_endpoint.test",
        "webhook_endpoint_id": endpoint.id,
        "event_type": event_type,
        "status_code": status,
        "success": True,
    }


@operation("deleteWebhookEndpoint")
async def delete(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await _found(connection, call, for_update=True)
        await objects.delete(connection, [one.id])
    return {"id": one.id, "object": "webhook_endpoint.deleted", "deleted": True}


@operation("listWebhookEventTypes")
async def list_event_types(call: OperationCall) -> Any:  # noqa: ARG001
    return {"object": "list", "data": list(WEBHOOK_EVENTS)}


async def _found(connection: AsyncConnection, call: OperationCall, *, for_update: bool = False) -> StoredObject:
    return await objects.get(connection, call.tenant, KIND, call.ids[0], call.now, for_update=for_update)
