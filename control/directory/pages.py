"""Lists in pages: each begins behind the last key of the one before it, so that changes in between move nothing."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final, Protocol

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import invalid_argument

DEFAULT_PAGE_SIZE: Final = 100
MAX_PAGE_SIZE: Final = 1000


class PageRequest(Protocol):
    @property
    def page_size(self) -> int: ...
    @property
    def page_token(self) -> str: ...


async def read_page(
    connection: AsyncConnection,
    query: sa.Select[Any],
    key: sa.Column[Any],
    request: PageRequest,
    *,
    descending: bool = False,
) -> tuple[list[sa.RowMapping], str]:
    """The rows of a page of the query, ordered by a key, and the token of the next page. Raises KvloomError
    (INVALID_ARGUMENT)."""
    if request.page_size < 0:
        raise invalid_argument("A page has a positive size.", "page_size")
    size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    if request.page_token:
        last = _decoded(request.page_token, key)
        query = query.where(key < last if descending else key > last)
    rows = list(
        (await connection.execute(query.order_by(key.desc() if descending else key).limit(size + 1))).mappings()
    )
    token = base64.urlsafe_b64encode(str(rows[size - 1][key]).encode()).decode() if len(rows) > size else ""
    return rows[:size], token


def _decoded(token: str, key: sa.Column[Any]) -> Any:
    try:
        return key.type.python_type(base64.b64decode(token, altchars=b"-_", validate=True).decode())
    except (binascii.Error, ValueError):  # UnicodeDecodeError is a ValueError
        raise invalid_argument("This is no token of a page.", "page_token") from None
