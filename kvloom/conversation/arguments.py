"""The arguments of tool calls in a conversation's history."""

from __future__ import annotations

import json
from typing import Any, Final

from kvloom.errors import invalid_argument

MAX_ARGUMENTS_DEPTH: Final = 64


def checked_arguments(arguments: str, field: str) -> str:
    """The arguments of a call in the history, which have to be a JSON object. An empty text stands for none. Raises
    KvloomError (INVALID_ARGUMENT)."""
    if not arguments.strip():
        return "{}"
    try:
        value: Any = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"{field} is not valid JSON.", field) from error
    if not isinstance(value, dict):
        raise invalid_argument(f"{field} must be a JSON object.", field)
    _check_depth(value, field)
    return arguments


def _check_depth(value: Any, field: str) -> None:
    """Raise KvloomError (INVALID_ARGUMENT) for JSON that is nested too deeply to be walked through."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_ARGUMENTS_DEPTH:
            raise invalid_argument(f"{field} is nested more than {MAX_ARGUMENTS_DEPTH} levels deep.", field)
        level = [child for node in level for child in _children(node)]


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []
