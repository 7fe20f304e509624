"""Pages of lists: the one that a query wants, and how OpenAI's API shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvloom.errors import KvloomError, invalid_argument


class Page(NamedTuple):
    """`after`: the id of the last entry that the caller has; "" for the first page."""

    after: str
    limit: int
    is_descending: bool


def page_of(query: Mapping[str, str], *, default: int = 20, most: int = 100, order: str = "desc") -> Page:
    """Raises KvloomError (INVALID_ARGUMENT) that names the parameter."""
    given = query.get("limit", str(default))
    limit = int(given) if given.isdecimal() and len(given) < 10 else 0
    if not 1 <= limit <= most:
        raise invalid_argument(f"limit must be a number from 1 to {most}.", "limit")
    wanted = query.get("order", order)
    if wanted not in ("asc", "desc"):
        raise invalid_argument("order must be asc or desc.", "order")
    return Page(query.get("after", ""), limit, wanted == "desc")


def unknown_cursor(name: str = "after") -> KvloomError:
    return invalid_argument(f"{name}: the list has no entry with this id.", name)


def as_list(data: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    ids = [entry["id"] for entry in data]
    return {
        "object": "list",
        "data": data,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }
