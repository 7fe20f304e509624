"""Lists in pages: each begins behind the last key of the one before it, so that changes in between move nothing."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final, Protocol

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from kvloom.errors import invalid_argument

DEFAULT_PAGE_SIZE: Final = 100
MAX_PAGE_SIZE: Final = 1000
MAX_PAGE_BYTES: Final = 2**20
"""The rows of a page have at most so many bytes as JSON, which is about the size of the page. A page has at least one
row."""
_READ_ROWS: Final = 50
_MAX_NUMBER: Final = 2**63 - 1
"""The largest key that a column of numbers has."""


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
    """The rows of a page of the query, ordered by a key, and the token of the next page. There are fewer than were
    asked for if they are large. Raises KvloomError (INVALID_ARGUMENT)."""
    if request.page_size < 0:
        raise invalid_argument("page_size must not be negative.", "page_size")
    size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    if request.page_token:
        last = _decoded(request.page_token, key)
        query = query.where(key < last if descending else key > last)
    query = query.order_by(key.desc() if descending else key)
    page: list[sa.RowMapping] = []
    num_bytes = 0
    while True:
        # A few at a time: a thousand large rows would be read for the few that a page has room for.
        step = query.offset(len(page)).limit(min(size + 1 - len(page), _READ_ROWS))
        rows = (await connection.execute(step)).mappings().all()
        for row in rows:
            num_bytes += len(msgspec.json.encode({str(name): value for name, value in row.items()}))
            if len(page) == size or (page and num_bytes > MAX_PAGE_BYTES):
                return page, base64.urlsafe_b64encode(str(page[-1][key]).encode()).decode()
            page.append(row)
        if len(rows) < _READ_ROWS:
            return page, ""


def _decoded(token: str, key: sa.Column[Any]) -> Any:
    try:
        last: Any = key.type.python_type(base64.b64decode(token, altchars=b"-_", validate=True).decode())
    except (binascii.Error, ValueError):  # UnicodeDecodeError is a ValueError
        last = None
    # A larger number no database can compare, and PostgreSQL no text with this character.
    if last is None or (isinstance(last, int) and abs(last) > _MAX_NUMBER) or (isinstance(last, str) and "\0" in last):
        raise invalid_argument("This is no token of a page.", "page_token")
    return last
