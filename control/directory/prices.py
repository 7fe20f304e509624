"""Prices. Only the operator of the fabric changes them. A price that was in force stays, because records refer to it: a
later one replaces it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from control.database.schema import MAX_INTEGER, prices
from control.directory import names
from control.directory.account_limits import MAX_PERCENT
from control.directory.actor import Actor, already_exists, failed_precondition, not_found
from control.directory.pages import read_page
from control.directory.transaction import DirectoryChange
from kvloom.errors import invalid_argument
from kvloom.v1 import directory_service_pb2 as pb
from kvloom.v1.control_service_pb2 import Price
from kvloom_common.tenancy.table import price_from_proto

MAX_PRICES: Final = 10_000
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MODEL: Final = re.compile(r"[^\x00-\x20\x7f*]{1,256}|\*")


async def create(change: DirectoryChange, request: pb.CreatePriceRequest) -> pb.CreatePriceResponse:
    change.actor.require_operator("prices")
    row = _row(request.price)
    if await _find(change.connection, row["id"]) is not None:
        raise already_exists("price", row["id"])
    is_same = sa.and_(prices.c.model == row["model"], prices.c.effective_from == row["effective_from"])
    if (same := await change.connection.scalar(sa.select(prices.c.id).where(is_same))) is not None:
        raise failed_precondition(f"The price {same!r} of {row['model']!r} is in force from the same time on.")
    if (await change.connection.execute(sa.select(sa.func.count()).select_from(prices))).scalar_one() >= MAX_PRICES:
        raise failed_precondition(f"There are {MAX_PRICES} prices already.")
    await change.connection.execute(sa.insert(prices).values(row))
    change.touch("prices")
    change.record(f"price:{row['id']}", "", None, row)
    return pb.CreatePriceResponse(price=shown(row))


async def list_(connection: AsyncConnection, actor: Actor, request: pb.ListPricesRequest) -> Any:  # noqa: ARG001
    query = sa.select(prices)
    if request.model:
        query = query.where(prices.c.model == request.model)
    rows, token = await read_page(connection, query, prices.c.id, request)
    return pb.ListPricesResponse(prices=[shown(row) for row in rows], next_page_token=token)


async def delete(change: DirectoryChange, request: pb.DeletePriceRequest) -> pb.DeletePriceResponse:
    change.actor.require_operator("prices")
    row = await _find(change.connection, request.id)
    if row is None:
        raise not_found("price", request.id)
    if row["effective_from"] <= change.now:
        raise failed_precondition(f"The price {request.id!r} has been in force: add a later one instead.")
    await change.connection.execute(sa.delete(prices).where(prices.c.id == request.id))
    change.touch("prices")
    change.record(f"price:{request.id}", "", row, None)
    return pb.DeletePriceResponse()


async def _find(connection: AsyncConnection, price_id: str) -> sa.RowMapping | None:
    return (await connection.execute(sa.select(prices).where(prices.c.id == price_id))).mappings().first()


def _row(given: Price) -> dict[str, Any]:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    price = price_from_proto(given)
    if price.id and not _ID.fullmatch(price.id):
        raise invalid_argument("The id has 1 to 64 letters, digits and any of '._-'.", "price.id")
    if not _MODEL.fullmatch(price.model):
        raise invalid_argument("A price is that of a model, of MODEL:ADAPTER, or of '*'.", "price.model")
    names.time(price.effective_from, "price.effective_from")
    row = {field: getattr(price, field) for field in price.__struct_fields__}
    for field, value in row.items():
        if field.endswith(("_nanos", "_percent")):
            names.integer(value, MAX_PERCENT if field.endswith("_percent") else MAX_INTEGER, f"price.{field}")
    row["id"] = price.id or secrets.token_hex(4)
    return row


def shown(row: Mapping[Any, Any]) -> Price:
    return Price(**{str(field): row[field] for field in row})
