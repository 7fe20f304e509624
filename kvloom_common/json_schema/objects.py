"""The keywords of objects.

JSON Schema allows any other properties where `additionalProperties` is absent, as it is in the schemas that most
clients make from their users' types. Small models then add properties until their tokens are used up. So an object has
the properties that its schema names, and no others, unless the schema speaks of others: what is written under the
narrower schema conforms to the given one, too.

Losses names what a guide cannot follow of a schema, by path and keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Loss(NamedTuple):
    """A keyword that a guide does not follow."""

    path: str
    """Where the keyword stands, from the schema's root: ".properties.ids", or "" for the root."""
    keyword: str
    reason: str


class UnfollowableSchema(Exception):  # noqa: N818  (a verdict about a schema)
    """A schema that must be followed as a whole has something that a guide cannot follow."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(f"{loss.path.lstrip('.') or 'the root'}: {loss.keyword!r} {loss.reason}")
        self.loss = loss


class Losses:
    """Collects what is dropped of a schema, or raises UnfollowableSchema at the first if nothing may be."""

    def __init__(self, *, is_lenient: bool) -> None:
        self.is_lenient = is_lenient
        self.found: list[Loss] = []

    def add(self, path: str, keyword: str, reason: str = "cannot be enforced while a model writes") -> None:
        loss = Loss(path, keyword[:64], reason)
        if not self.is_lenient:
            raise UnfollowableSchema(loss)
        self.found.append(loss)


def object_schema(
    part: Mapping[str, Any], path: str, losses: Losses, child: Callable[[Any, str], Any], *, is_closed: bool
) -> dict[str, Any]:
    """`part` has been cleaned; `child` rewrites a schema within it. `is_closed`: no other properties are wanted where
    none are named."""
    whole: dict[str, Any] = {"type": "object"}
    properties = part.get("properties")
    patterns = dict(part.get("patternProperties", {}))
    additional = part.get("additionalProperties")
    if len(patterns) > 1 and losses.is_lenient:
        losses.add(path, "patternProperties", "with several patterns may be ambiguous")
        patterns, additional = {}, None
        is_closed = False
    required = _required(part, path, losses)
    if properties is not None or (required and additional is not None and additional is not False):
        properties = dict(properties or {})
        for name in required:
            properties.setdefault(name, {} if additional is None else additional)
        whole["properties"] = {name: child(each, f"{path}.properties.{name}") for name, each in properties.items()}
    if patterns:
        whole["patternProperties"] = {
            name: child(each, f"{path}.patternProperties.{name}") for name, each in patterns.items()
        }
    if required:
        whole["required"] = required
    sizes = _sizes(part, properties, required, additional, path, losses)
    whole.update(sizes)
    if additional is not None:
        whole["additionalProperties"] = child(additional, f"{path}.additionalProperties")
    elif is_closed and properties is not None and not patterns and "minProperties" not in sizes:
        whole["additionalProperties"] = False
    return whole


def _required(part: Mapping[str, Any], path: str, losses: Losses) -> list[str]:
    required = list(dict.fromkeys(part.get("required", ())))
    if part.get("additionalProperties") is not False or "patternProperties" in part:
        return required
    missing = [name for name in required if name not in part.get("properties", {})]
    if missing:
        losses.add(path, "required", f"names {missing[0][:64]!r}, which additionalProperties: false excludes")
    return [name for name in required if name not in missing]


def _sizes(
    part: Mapping[str, Any],
    properties: Mapping[str, Any] | None,
    required: list[str],
    additional: Any,
    path: str,
    losses: Losses,
) -> dict[str, int]:
    """`minProperties` and `maxProperties`: a compiler counts only where each property that is named is required."""
    least, most = int(part.get("minProperties", 0)), part.get("maxProperties")
    named = properties or {}
    found: dict[str, int] = {}
    if least > len(required):
        found["minProperties"] = least
    if most is not None and not (additional is False and most >= len(named)):
        found["maxProperties"] = int(most)
    if not found or set(named) <= set(required):
        return found
    if set(found) == {"minProperties"} and least >= len(named) and additional in (None, False):
        required[:] = list(named)  # all of them, then
        return found if least > len(named) else {}
    for keyword in found:
        losses.add(path, keyword, "cannot be enforced beside properties that are optional")
    return {}
