"""Rewrites a schema into the part of the language that compilers of guides follow.

What is left has single types, `enum`, `anyOf` and references to `$defs`, beside the keywords of each type. Schemas that
hold for one value are merged; `oneOf` becomes `anyOf`, whose alternatives a model tries in their order; a schema whose
keywords are about one type has that type. All of this makes a schema narrower, or leaves it as it was, except for what
`Losses` reports. The work is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvloom_common.json_schema.keywords import (
    ARRAY_KEYWORDS,
    NUMBER_KEYWORDS,
    OBJECT_KEYWORDS,
    STRING_KEYWORDS,
    cleaned,
)
from kvloom_common.json_schema.merging import Contradiction, Unmergeable, merged, type_names
from kvloom_common.json_schema.objects import Loss, Losses, UnfollowableSchema, object_schema
from kvloom_common.json_schema.references import References
from kvloom_common.json_schema.schema_check import conforms

MAX_PARTS: Final = 10_000
"""Parts of a schema that are rewritten, those counted that references bring in again."""
VALUES_PER_PART: Final = 4
CHARS_PER_PART: Final = 8
"""So many values of an enumeration, or characters of a pattern, are as much work as a part."""
MAX_CHAIN: Final = 16
"""References and combinations within one another that hold for one value."""
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}

_BY_TYPE: Final = {
    "object": OBJECT_KEYWORDS,
    "array": ARRAY_KEYWORDS,
    "string": STRING_KEYWORDS,
    "number": NUMBER_KEYWORDS,
    "integer": NUMBER_KEYWORDS,
}
_COMBINING: Final = ("$ref", "allOf", "anyOf", "oneOf")


class Simplified(NamedTuple):
    """A schema that a guide can follow."""

    schema: dict[str, Any] | bool
    definitions: dict[str, Any]
    """The definitions to which the schema refers, by the names that stand behind "#/$defs/"."""
    losses: Sequence[Loss]
    """The parts of the schema that were dropped."""
    num_parts: int = 0
    """How much work it was."""

    def whole(self) -> dict[str, Any]:
        schema = {"not": {}} if self.schema is False else {} if self.schema is True else self.schema
        return {**schema, "$defs": self.definitions} if self.definitions else schema


def simplified(
    schema: Any,
    *,
    is_lenient: bool = False,
    of_arguments: bool = False,
    prefix: str = "d",
    max_parts: int = MAX_PARTS,
) -> Simplified:
    """`is_lenient`: what cannot be followed is dropped; otherwise UnfollowableSchema is raised. `of_arguments`: the
    value is a tool's arguments, which are an object whatever the schema says. `prefix` begins the names of the
    definitions."""
    losses = Losses(is_lenient=is_lenient)
    work = _Simplification(schema, losses, prefix, max_parts)
    try:
        return work.whole(of_arguments=of_arguments)
    except (_TooComplex, RecursionError):
        losses = Losses(is_lenient=is_lenient)
        losses.add("", "$ref" if isinstance(schema, Mapping) and "$ref" in schema else "allOf", "is too complex")
        return Simplified(dict(ANY_OBJECT) if of_arguments else True, {}, losses.found, max_parts)


class _TooComplex(Exception):  # noqa: N818  (a verdict about a schema)
    pass


class _Simplification:
    def __init__(self, root: Any, losses: Losses, prefix: str, max_parts: int) -> None:
        self._root = root
        self._losses = losses
        self._prefix = prefix
        self._references = References(root)
        self._names: dict[int, str] = {}
        """By the identity of what a reference names: its definition."""
        self._waiting: list[tuple[str, Any, str]] = []
        self._clean: dict[int, Mapping[str, Any]] = {}
        """Parts that were made here, which need no cleaning, by their identity."""
        self._max_parts = self._num_left = max_parts

    def whole(self, *, of_arguments: bool) -> Simplified:
        root = self._made({"allOf": [self._root, self._made({"type": "object"})]}) if of_arguments else self._root
        schema = self._schema(root, "")
        if of_arguments and not _is_object(schema):
            schema = dict(ANY_OBJECT)  # what was lost has been reported
        definitions: dict[str, Any] = {}
        while self._waiting:
            name, target, path = self._waiting.pop()
            definitions[name] = self._schema(target, path)
        return Simplified(schema, definitions, self._losses.found, self._max_parts - self._num_left)

    def _made(self, part: dict[str, Any]) -> dict[str, Any]:
        self._clean[id(part)] = part
        return part

    def _schema(self, node: Any, path: str, *, is_closed: bool = True) -> Any:
        self._num_left -= 1
        if self._num_left < 0:
            raise _TooComplex
        if not isinstance(node, Mapping):
            return node if isinstance(node, bool) else {}
        part = self._cleaned(node, path)
        own = {keyword: value for keyword, value in part.items() if keyword not in _COMBINING}
        if not own and len(part) == 1:
            [(keyword, value)] = part.items()
            if keyword == "$ref":
                return self._reference(value, node, path)
            if keyword != "allOf":
                return self._any_of([(each, f"{path}.{keyword}[{i}]") for i, each in enumerate(value)], path, keyword)
            if len(value) == 1:
                return self._schema(value[0], f"{path}.allOf[0]", is_closed=is_closed)
        parts: list[dict[str, Any]] = []
        choices: list[tuple[str, list[Any]]] = []
        try:
            self._collect(part, node, path, parts, choices, ())
            whole = merged(parts)
        except Contradiction as found:
            self._losses.add(path, found.keyword, "leaves no value")
            return {}
        except Unmergeable:
            return self._kept_apart(parts, choices, path)
        if not choices:
            return self._one(whole, path, is_closed=is_closed)
        (keyword, first), rest = choices[0], choices[1:]
        others = [self._made({name: alternatives}) for name, alternatives in rest]
        if not whole and not others:
            alternatives = [(each, f"{path}.{keyword}[{i}]") for i, each in enumerate(first)]
        else:
            alternatives = [
                (self._made({"allOf": [self._made(dict(whole)), each, *others]}), f"{path}.{keyword}[{i}]")
                for i, each in enumerate(first)
            ]
        return self._any_of(alternatives, path, keyword)

    def _cleaned(self, node: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        if id(node) in self._clean:
            return node
        values, pattern = node.get("enum"), node.get("pattern")
        if isinstance(values, list):
            self._num_left -= len(values) // VALUES_PER_PART
        if isinstance(pattern, str):
            self._num_left -= len(pattern) // CHARS_PER_PART
        if self._num_left < 0:
            raise _TooComplex
        part = cleaned(node, path, self._losses)
        if "const" in part:
            value = part.pop("const")
            if any(_same(value, each) for each in part.get("enum", [value])):
                part["enum"] = [value]
            else:
                self._losses.add(path, "const", "is no value of 'enum'")
        return part

    def _collect(
        self,
        part: Mapping[str, Any],
        node: Any,
        path: str,
        parts: list[dict[str, Any]],
        choices: list[tuple[str, list[Any]]],
        chain: tuple[int, ...],
    ) -> None:
        """Takes apart what holds for one value: schemas without combinations, and lists of alternatives."""
        self._num_left -= 1
        if self._num_left < 0:
            raise _TooComplex
        own = {keyword: value for keyword, value in part.items() if keyword not in _COMBINING}
        if own:
            parts.append(own)
        choices += [(keyword, part[keyword]) for keyword in ("anyOf", "oneOf") if keyword in part]
        is_made = id(part) in self._clean
        members = [(each, path if is_made else f"{path}.allOf[{i}]") for i, each in enumerate(part.get("allOf", ()))]
        if "$ref" in part:
            members.append((self._target(part["$ref"], node, path), f"{path}.$ref"))
        for each, where in members:
            if each is False:
                raise Contradiction("allOf")
            if not isinstance(each, Mapping):
                continue
            if id(each) in chain or len(chain) >= MAX_CHAIN:
                self._losses.add(where, "$ref", "refers to itself")
                continue
            self._collect(self._cleaned(each, where), each, where, parts, choices, (*chain, id(each)))

    def _target(self, reference: str, node: Any, path: str) -> Any:
        try:
            return self._references.target(reference, node)
        except LookupError:
            self._losses.add(path, "$ref", f"names {reference[:64]!r}, which this schema does not have")
            return True

    def _reference(self, reference: str, node: Any, path: str) -> Any:
        target = self._target(reference, node, path)
        if not isinstance(target, Mapping):
            return target if isinstance(target, bool) else {}
        if target.keys() == {"$ref"} and target["$ref"] == reference:
            self._losses.add(path, "$ref", "refers to itself")
            return {}
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"{self._prefix}{len(self._names)}"
            where = reference.partition("#")[2].replace("/", ".")
            self._waiting.append((name, target, where))
        return {"$ref": f"#/$defs/{name}"}

    def _any_of(self, alternatives: Sequence[tuple[Any, str]], path: str, keyword: str) -> Any:
        found: list[Any] = []
        for each, where in alternatives:
            try:
                schema = self._alternative(each, where)
            except Contradiction:
                continue
            if schema is True or schema == {}:
                return {}
            if schema is not False and schema not in found:
                found.append(schema)
        if not found:
            self._losses.add(path, keyword, "leaves no value")
            return {}
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _alternative(self, node: Any, path: str) -> Any:
        """Raises Contradiction for one that no value conforms to, which the others make up for."""
        if not isinstance(node, Mapping) or id(node) not in self._clean:
            return self._schema(node, path)
        parts: list[dict[str, Any]] = []
        try:
            self._collect(node, node, path, parts, [], ())
            merged(parts)
        except Unmergeable:
            pass
        return self._schema(node, path)

    def _kept_apart(self, parts: Sequence[dict[str, Any]], choices: Sequence[tuple[str, list[Any]]], path: str) -> Any:
        """Leaves to the compiler, as they are, the parts that cannot be merged: each would exclude the others'
        properties."""
        whole = [self._one(part, path, is_closed=False) for part in parts]
        for keyword, alternatives in choices:
            found = [
                self._schema(each, f"{path}.{keyword}[{i}]", is_closed=False) for i, each in enumerate(alternatives)
            ]
            whole.append({"anyOf": found})
        return {"allOf": whole}

    def _one(self, part: Mapping[str, Any], path: str, *, is_closed: bool) -> Any:
        """A schema without combinations."""
        if "enum" in part:
            return self._values(part, path)
        names = type_names(part["type"]) if "type" in part else _implied(part)
        found = [self._typed(name, part, path, is_closed=is_closed) for name in names]
        if not found:
            return {}
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _values(self, part: Mapping[str, Any], path: str) -> Any:
        plain = {keyword: value for keyword, value in part.items() if keyword not in ("enum", "pattern", "format")}
        values = [value for value in part["enum"] if conforms(value, plain)]
        if not values:
            self._losses.add(path, "enum", "has no value that the other keywords allow")
            return {}
        texts = {keyword: part[keyword] for keyword in ("pattern", "format") if keyword in part}
        if texts and all(isinstance(value, str) for value in values):
            return {"type": "string", "enum": values, **texts}
        return {"enum": values}

    def _typed(self, name: str, part: Mapping[str, Any], path: str, *, is_closed: bool) -> Any:
        if name == "object":
            return object_schema(part, path, self._losses, self._schema, is_closed=is_closed)
        whole: dict[str, Any] = {"type": name}
        for keyword in part:
            if keyword not in _BY_TYPE.get(name, ()):
                continue
            value = part[keyword]
            if keyword == "items":
                value = self._schema(value, f"{path}.items")
            elif keyword == "prefixItems":
                value = [self._schema(each, f"{path}.prefixItems[{i}]") for i, each in enumerate(value)]
            elif keyword.endswith(("Items", "Length")):
                value = int(value)
            whole[keyword] = value
        return whole


def _is_object(schema: Any) -> bool:
    """Every value that conforms is an object."""
    if not isinstance(schema, Mapping):
        return False
    if "enum" in schema:
        return all(isinstance(value, Mapping) for value in schema["enum"])
    combined = [*map(_is_object, schema.get("allOf", ()))]
    alternatives = [*map(_is_object, schema.get("anyOf", ()))]
    return schema.get("type") == "object" or any(combined) or (bool(alternatives) and all(alternatives))


def _implied(part: Mapping[str, Any]) -> Sequence[str]:
    """The type that a schema is about which names none; none if it is about several, or any."""
    names = [name for name, keywords in _BY_TYPE.items() if name != "integer" and not keywords.isdisjoint(part)]
    if len(names) > 1:
        return ("object", "array", "string", "number", "boolean", "null")
    return names


def _same(left: Any, right: Any) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


__all__ = ["ANY_OBJECT", "Simplified", "UnfollowableSchema", "simplified"]
