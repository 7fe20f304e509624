"""The schema that a compiler of guides gets: simplified, bounded, and without what the compiler cannot follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from kvloom_common.json_schema.bounded import bounded
from kvloom_common.json_schema.simplify import ANY_OBJECT, UnfollowableSchema, simplified
from shard_server.engines.torch_engine.sampling.guides import GuideError

_MAX_SEARCHED: Final = 200
"""Parts of a schema that are compiled alone, to find the one that cannot be."""


def guide_schema(text: str) -> dict[str, Any]:
    """Raises GuideError that names the place and the keyword which cannot be followed."""
    try:
        return bounded(simplified(json.loads(text)).whole())
    except UnfollowableSchema as error:
        raise GuideError(str(error), names_place=True) from error


def relaxed(text: str, relaxable: Sequence[str], compiles: Callable[[str], bool]) -> str | None:
    """The schema with any object in place of the definitions that cannot be compiled, each by itself; if that is not
    enough, of all that may be replaced. None if none of them is at fault. `compiles` gets the text of a schema."""
    schema = json.loads(text)
    definitions = schema.get("$defs", {})
    names = [name for name in relaxable if name in definitions]
    at_fault = [name for name in names if not compiles(_alone(name, definitions))]
    for replaced in (at_fault, names):
        if not replaced:
            continue
        kept = {name: ANY_OBJECT if name in replaced else each for name, each in definitions.items()}
        found = json.dumps({**schema, "$defs": kept}, ensure_ascii=False)
        if compiles(found):
            return found
    return None


def _alone(name: str, definitions: dict[str, Any]) -> str:
    return json.dumps({"$ref": f"#/$defs/{name}", "$defs": definitions}, ensure_ascii=False)


def culprit(text: str, compiles: Callable[[str], bool]) -> str | None:
    """Where a schema cannot be compiled: the place and the keywords of the first part that cannot be by itself."""
    for number, (path, part) in enumerate(_parts(json.loads(text), "")):
        if number >= _MAX_SEARCHED:
            break
        if not compiles(json.dumps(part, ensure_ascii=False)):
            return f"{path.lstrip('.') or 'the root'}: {', '.join(sorted(part.keys() - {'type'}))}"
    return None


def _parts(node: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of a schema, each without those within it, innermost first."""
    if isinstance(node, list):
        for number, child in enumerate(node):
            yield from _parts(child, f"{path}[{number}]")
    elif isinstance(node, dict):
        own: dict[str, Any] = {}
        for keyword, value in node.items():
            if isinstance(value, dict) and keyword in ("properties", "patternProperties", "$defs"):
                for name, child in value.items():
                    yield from _parts(child, f"{path}.{keyword}.{name}")
            elif keyword not in ("enum", "const") and isinstance(value, dict | list) and keyword != "required":
                yield from _parts(value, f"{path}.{keyword}")
            elif keyword not in ("required", "additionalProperties", "$ref"):
                own[keyword] = value
        if own:
            yield path, own
