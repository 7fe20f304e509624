"""The list of models as Anthropic's clients expect it."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvloom.errors import invalid_argument

DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 1000


def model_object(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    """`created` is a Unix time; `max_model_len` the model's window in tokens, None while it is not known."""
    created_at = datetime.datetime.fromtimestamp(created, datetime.UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created_at.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def page_of(models: Sequence[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The page of the list that `limit`, `after_id` and `before_id` ask for. Raises KvloomError (INVALID_ARGUMENT)."""
    limit = _limit(query.get("limit", str(DEFAULT_LIMIT)))
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise invalid_argument("Give either after_id or before_id.", "before_id")
    rest = list(models)
    if after is not None:
        rest = rest[_position(models, after, "after_id") + 1 :]
    if before is not None:
        rest = rest[: _position(models, before, "before_id")]
    page = rest[:limit] if before is None else rest[-limit:]
    return {
        "data": page,
        "has_more": len(rest) > len(page),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _limit(given: str) -> int:
    if not (given.isascii() and given.isdigit() and len(given) <= len(str(MAX_LIMIT)) and 1 <= int(given) <= MAX_LIMIT):
        raise invalid_argument(f"limit must be a number between 1 and {MAX_LIMIT}.", "limit")
    return int(given)


def _position(models: Sequence[dict[str, Any]], name: str, field: str) -> int:
    for position, model in enumerate(models):
        if model["id"] == name:
            return position
    raise invalid_argument(f"{field}: there is no model {name[:64]!r}.", field)
