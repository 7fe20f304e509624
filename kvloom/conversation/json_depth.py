"""How deep the JSON that callers send may be nested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvloom.errors import invalid_argument


def check_depth(value: Any, field: str, max_levels: int) -> None:
    """Raise KvloomError (INVALID_ARGUMENT) for JSON that is nested more deeply. The check does not recurse."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > max_levels:
            raise invalid_argument(f"{field} is nested more than {max_levels} levels deep.", field)
        level = [child for node in level for child in _children(node)]


def _children(node: Any) -> list[Any]:
    if isinstance(node, Mapping):
        return list(node.values())
    return node if isinstance(node, list) else []
