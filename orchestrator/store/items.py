"""The items of conversations and responses as rows. Each function works within the caller's transaction, which has
found their parent before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from orchestrator.database.schema import items, objects
from orchestrator.seal import seal_of
from orchestrator.store.objects import as_json, new_id
from orchestrator.store.pages import Page, unknown_cursor

Item = dict[str, Any]

_PREFIXES: Final = {"message": "msg_", "function_call": "fc_", "reasoning": "rs_", "custom_tool_call": "ctc_"}


def normalised(given: Item) -> Item:
    """An item of an input as it is stored and shown: with a type, an id, and its content as parts."""
    kind = given.get("type") or "message"
    prefix = _PREFIXES.get(kind) or f"{kind[:32]}_"
    item = {**given, "type": kind, "id": given.get("id") or new_id(prefix)}
    if kind == "message":
        content = given.get("content")
        if isinstance(content, str):
            part: Item = {"type": "input_text", "text": content}
            if given.get("role") == "assistant":
                part = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
            item["content"] = [part]
        item["status"] = given.get("status") or "completed"
    elif "status" in item or "call_id" in item:
        item["status"] = item.get("status") or "completed"
    return item


async def append(
    connection: AsyncConnection, tenant: str, parent: str, new: Sequence[Item], *, num_output: int = 0
) -> None:
    """Adds items at the end. The last `num_output` of them are output."""
    if not new:
        return
    first = await connection.scalar(sa.select(sa.func.max(items.c.position)).where(items.c.parent == parent))
    first = 0 if first is None else first + 1
    seal = seal_of(connection)
    rows = [
        {
            "parent": parent,
            "position": first + number,
            "id": item["id"],
            "tenant": tenant,
            "is_output": number >= len(new) - num_output,
            "body": seal.sealed(tenant, as_json(item)),
        }
        for number, item in enumerate(new)
    ]
    await connection.execute(items.insert(), rows)


async def count(connection: AsyncConnection, parent: str) -> int:
    return await connection.scalar(sa.select(sa.func.count()).where(items.c.parent == parent)) or 0


async def of_parent(
    connection: AsyncConnection, tenant: str, parent: str, *, is_output: bool | None = None
) -> list[bytes]:
    """The JSON of all items of a tenant's object, in order; `is_output`: only of the output, or only of the input."""
    wanted = sa.select(items.c.body).where(items.c.parent == parent)
    if is_output is not None:
        wanted = wanted.where(items.c.is_output == is_output)
    bodies = (await connection.scalars(wanted.order_by(items.c.position))).all()
    seal = seal_of(connection)
    return [seal.opened(tenant, body) for body in bodies]


async def find(connection: AsyncConnection, tenant: str, parent: str, item_id: str) -> Item | None:
    wanted = sa.select(items.c.body).where(items.c.parent == parent, items.c.id == item_id)
    body = await connection.scalar(wanted.order_by(items.c.position).limit(1))
    return None if body is None else msgspec.json.decode(seal_of(connection).opened(tenant, body))


async def place_of(connection: AsyncConnection, parents: Sequence[str], item_id: str) -> tuple[str, int] | None:
    """The last of the parents that has the item, and how many items it has before that one."""
    wanted = sa.select(items.c.parent, items.c.position).where(items.c.parent.in_(parents), items.c.id == item_id)
    places = {row.parent: row.position for row in await connection.execute(wanted)}
    for parent in reversed(parents):
        if parent in places:
            before = sa.select(sa.func.count()).where(items.c.parent == parent, items.c.position < places[parent])
            return parent, await connection.scalar(before) or 0
    return None


async def of_ids(connection: AsyncConnection, tenant: str, item_ids: Sequence[str], now: float) -> dict[str, bytes]:
    """The JSON of a tenant's items, by their ids, as far as there are any that are not deleted."""
    is_alive = sa.and_(
        objects.c.kind != "deleted_conversation", sa.or_(objects.c.expires_at.is_(None), objects.c.expires_at > now)
    )
    wanted = sa.select(items.c.id, items.c.body).join(objects, objects.c.id == items.c.parent)
    wanted = wanted.where(items.c.tenant == tenant, items.c.id.in_(item_ids), is_alive)
    seal = seal_of(connection)
    return {row.id: seal.opened(tenant, row.body) for row in await connection.execute(wanted)}


async def listed(
    connection: AsyncConnection, tenant: str, parents: Sequence[str], page: Page, *, only_input_of: str = ""
) -> tuple[list[Item], bool]:
    """A page of the items of several parents of a tenant, one parent after the other, and True if there are more. Of
    `only_input_of` there is only the input. Raises KvloomError (INVALID_ARGUMENT)."""
    rank = sa.case({parent: number for number, parent in enumerate(parents)}, value=items.c.parent)
    wanted = sa.select(items.c.body).where(items.c.parent.in_(parents))
    if only_input_of:
        wanted = wanted.where(sa.or_(items.c.parent != only_input_of, items.c.is_output.is_(False)))
    if page.after:
        at = sa.select(rank, items.c.position).where(items.c.parent.in_(parents), items.c.id == page.after)
        last = (await connection.execute(at.limit(1))).one_or_none()
        if last is None:
            raise unknown_cursor()
        key, there = sa.tuple_(rank, items.c.position), sa.tuple_(sa.literal(last[0]), sa.literal(last[1]))
        wanted = wanted.where(key < there if page.is_descending else key > there)
    order = [column.desc() if page.is_descending else column.asc() for column in (rank, items.c.position)]
    bodies = (await connection.scalars(wanted.order_by(*order).limit(page.limit + 1))).all()
    seal = seal_of(connection)
    return [msgspec.json.decode(seal.opened(tenant, body)) for body in bodies[: page.limit]], len(bodies) > page.limit


async def delete(connection: AsyncConnection, parent: str, item_id: str) -> None:
    await connection.execute(items.delete().where(items.c.parent == parent, items.c.id == item_id))


def text_of(item: Item) -> str:
    """The text that an item has, whatever its kind."""
    content = item.get("content") or item.get("summary") or item.get("arguments") or item.get("output") or ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
