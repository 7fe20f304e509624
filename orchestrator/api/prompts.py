"""Prompts: templates that responses name, with variables. A version never changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.text.restored_text import VARIABLE
from orchestrator.api.call import OperationCall, operation, quota_reached
from orchestrator.database.schema import objects as table
from orchestrator.store import objects
from orchestrator.store.objects import StoredObject, new_id
from orchestrator.store.pages import as_list, page_of

KIND: Final = "prompt"
VERSION_KIND: Final = "prompt_version"
MAX_PROMPTS: Final = 1000
MAX_VERSIONS: Final = 1000
_MAX_DIGITS: Final = 9


def shown(one: StoredObject, version: StoredObject) -> dict[str, Any]:
    return {
        "id": one.id,
        "object": "prompt",
        "created_at": int(one.created_at),
        "name": one.body["name"],
        "metadata": one.body["metadata"],
        "latest_version": str(one.body["version"]),
        "version": version.label,
        "version_created_at": int(version.created_at),
        **version.body,
    }


@operation("createPrompt")
async def create(call: OperationCall) -> Any:
    given = call.body
    body = {"name": given.get("name"), "metadata": given.get("metadata") or {}, "version": 1}
    one = StoredObject(new_id("pmpt_"), call.now, None, "", "", body)
    version = _version(call, one.id, 1)
    async with call.database.writing() as connection:
        if await objects.count(connection, call.tenant, KIND, call.now) >= MAX_PROMPTS:
            raise quota_reached(f"There are {MAX_PROMPTS} prompts already.")
        await objects.add(connection, call.tenant, KIND, one)
        await objects.add(connection, call.tenant, VERSION_KIND, version)
    return shown(one, version)


@operation("createPromptVersion")
async def create_version(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await _found(connection, call, call.ids[0], for_update=True)
        number = one.body["version"] + 1
        if number > MAX_VERSIONS:
            raise quota_reached(f"The prompt has {MAX_VERSIONS} versions already.")
        version = _version(call, one.id, number)
        one = one._replace(body={**one.body, "version": number})
        await objects.change(connection, call.tenant, one.id, one.body)
        await objects.add(connection, call.tenant, VERSION_KIND, version)
    return shown(one, version)


@operation("listPrompts")
async def list_prompts(call: OperationCall) -> Any:
    page = page_of(call.query)
    async with call.database.reading() as connection:
        found, has_more = await objects.listed(connection, call.tenant, KIND, page, call.now)
        data = [shown(one, await _version_of(connection, call, one, "")) for one in found]
    return as_list(data, has_more=has_more)


@operation("getPrompt")
async def get(call: OperationCall) -> Any:
    """The latest version, or that of the query."""
    async with call.database.reading() as connection:
        one = await _found(connection, call, call.ids[0])
        return shown(one, await _version_of(connection, call, one, call.query.get("version", "")))


@operation("deletePrompt")
async def delete(call: OperationCall) -> Any:
    async with call.database.writing() as connection:
        one = await _found(connection, call, call.ids[0], for_update=True)
        is_version = sa.and_(table.c.tenant == call.tenant, table.c.kind == VERSION_KIND, table.c.parent == one.id)
        versions = (await connection.scalars(sa.select(table.c.id).where(is_version))).all()
        await objects.delete(connection, [one.id, *versions])
    return {"id": one.id, "object": "prompt.deleted", "deleted": True}


async def read(connection: AsyncConnection, call: OperationCall, prompt_id: str, version: str) -> dict[str, Any]:
    """The version of a prompt that a response names; "": the latest. Raises KvloomError (NOT_FOUND)."""
    one = await objects.get(connection, call.tenant, KIND, prompt_id, call.now, "prompt.id")
    found = await _version_of(connection, call, one, version)
    return {"version": found.label, **found.body}


def _version(call: OperationCall, prompt_id: str, number: int) -> StoredObject:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    instructions, items = call.body.get("instructions"), call.body.get("input") or []
    for place, item in enumerate(items):
        if item.get("type", "message") != "message":
            raise invalid_argument(f"input[{place}].type must be message.", f"input[{place}].type")
    if not instructions and not items:
        raise invalid_argument("A prompt has instructions, input or both.", "instructions")
    names = {name for text in _texts(instructions, items) for name in VARIABLE.findall(text)}
    body = {"instructions": instructions, "input": items, "variables": sorted(names)}
    return StoredObject(f"{prompt_id}.{number}", call.now, None, prompt_id, str(number), body)


def _texts(instructions: str | None, items: list[Mapping[str, Any]]) -> Iterator[str]:
    yield instructions or ""
    for item in items:
        content = item.get("content") or ""
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content if isinstance(part.get("text"), str))


async def _version_of(
    connection: AsyncConnection, call: OperationCall, one: StoredObject, version: str
) -> StoredObject:
    """Raises KvloomError (NOT_FOUND)."""
    wanted = version or str(one.body["version"])
    if wanted.isascii() and wanted.isdecimal() and len(wanted) <= _MAX_DIGITS:
        found = await objects.find(connection, call.tenant, VERSION_KIND, f"{one.id}.{wanted}", call.now)
        if found is not None:
            return found
    message = f"The prompt has no version {version[:64]!r}."
    raise KvloomError(ErrorReason.ERROR_REASON_NOT_FOUND, message, field="prompt.version")


async def _found(
    connection: AsyncConnection, call: OperationCall, prompt_id: str, *, for_update: bool = False
) -> StoredObject:
    return await objects.get(connection, call.tenant, KIND, prompt_id, call.now, for_update=for_update)
