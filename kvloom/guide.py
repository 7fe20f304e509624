"""Limits and checks for guides: the errors that can be found without compiling a guide, for every entry point."""

from __future__ import annotations

import json
import math
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from kvloom.errors import invalid_argument
from kvloom.v1.generation_pb2 import Guide, StructuralTags

GUIDE_FIELD: Final = "sampling.guide"
"""The name of the guide's field in errors of the router and the shards."""
MAX_SCHEMA_BYTES: Final = 64 * 2**10
MAX_SCHEMA_DEPTH: Final = 64
MAX_PATTERN_BYTES: Final = 16 * 2**10
"""The limit for a regular expression or a grammar."""
MAX_CHOICES: Final = 1024
MAX_CHOICE_BYTES: Final = 64 * 2**10
"""The limit for all choices together."""
MAX_TAGS: Final = 1024
MAX_TRIGGERS: Final = 16
MAX_TRIGGER_BYTES: Final = 256
MAX_TAG_BYTES: Final = 1024
"""The limit for the begin and for the end of a structural tag."""
MAX_MULTIPLE: Final = 10_000
"""The limit for the digits of `multipleOf`, read as an integer: a compiler makes that many states."""
MAX_MULTIPLES: Final = 100_000
"""The limit for those of a whole schema together, and for their least common multiple where schemas are combined, since
a compiler then makes as many states as that: it takes half a second and 40 MB."""
_COMBINING: Final = frozenset(("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if"))


def check_guide(guide: Guide, field: str) -> None:
    """Raise KvloomError (INVALID_ARGUMENT) that names `field`. A guide that passes may still fail to compile."""
    form = guide.WhichOneof("form")
    if form is None:
        forms = "json_object, json_schema, regex, choice, grammar and structural_tags"
        raise invalid_argument(f"{field} must hold one of {forms}.", field)
    if form == "json_object":
        if not guide.json_object:
            raise invalid_argument(f"{field}.json_object can only be true.", field)
    elif form == "json_schema":
        _check_schema(guide.json_schema, field)
    elif form == "choice":
        _check_choices(list(guide.choice.texts), field)
    elif form == "structural_tags":
        _check_structural_tags(guide.structural_tags, field)
    else:
        _check_pattern(guide.regex if form == "regex" else guide.grammar, form, field)


def _check_schema(text: str, field: str) -> _Multiples:
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise invalid_argument(f"{field}: the schema is longer than {MAX_SCHEMA_BYTES} bytes.", field)
    try:
        schema = json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"{field}: the schema is not JSON.", field) from error
    if not isinstance(schema, dict | bool):
        raise invalid_argument(f"{field}: the schema must be a JSON object.", field)
    multiples = _Multiples()
    _check_node(schema, field, MAX_SCHEMA_DEPTH, multiples)
    multiples.check(field)
    return multiples


class _Multiples:
    """The different `multipleOf` of schemas."""

    def __init__(self) -> None:
        self.values: set[int | Decimal] = set()
        self.are_combined = False

    def check(self, field: str) -> None:
        """Raises KvloomError (INVALID_ARGUMENT)."""
        if sum(map(digits_of_multiple, self.values)) > MAX_MULTIPLES or (
            self.are_combined and self._least_common() > MAX_MULTIPLES
        ):
            message = f"{field}: the multipleOf of the schema are too many or too large together."
            raise invalid_argument(message, field)

    def _least_common(self) -> int:
        """The least common multiple of the values, as a whole number of the smallest decimal place that one of them
        has. Stops above the limit."""
        parts = [Decimal(value).normalize().as_tuple() for value in self.values]
        exponents = [part.exponent for part in parts if isinstance(part.exponent, int)]
        least = 1
        for part, exponent in zip(parts, exponents, strict=True):
            value = int("".join(map(str, part.digits))) * 10 ** (exponent - min(exponents))
            least = math.lcm(least, value) if value else least
            if least > MAX_MULTIPLES:
                break
        return least


def _check_node(node: Any, field: str, levels_left: int, multiples: _Multiples) -> None:
    if not levels_left:
        raise invalid_argument(f"{field}: the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels.", field)
    if isinstance(node, list):
        for child in node:
            _check_node(child, field, levels_left - 1, multiples)
    elif isinstance(node, dict):
        multiple = node.get("multipleOf")
        if isinstance(multiple, int | Decimal):
            if digits_of_multiple(multiple) > MAX_MULTIPLE:
                raise invalid_argument(f"{field}: multipleOf must not have more digits than {MAX_MULTIPLE}.", field)
            multiples.values.add(multiple)
        multiples.are_combined = multiples.are_combined or not _COMBINING.isdisjoint(node)
        for child in node.values():
            _check_node(child, field, levels_left - 1, multiples)


def digits_of_multiple(number: float | Decimal) -> int:
    """The number without its decimal point: 0.25 → 25, 1500 → 1500. Above MAX_MULTIPLE for what has too many places."""
    try:
        digits = Decimal(repr(number) if isinstance(number, float) else number).normalize().as_tuple()
    except InvalidOperation:
        return MAX_MULTIPLE + 1
    value = int("".join(map(str, digits.digits)))
    exponent = digits.exponent
    if not isinstance(exponent, int) or abs(exponent) > 9:
        return MAX_MULTIPLE + 1
    return value * 10 ** max(exponent, 0)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _check_choices(texts: list[str], field: str) -> None:
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise invalid_argument(f"{field} must hold 1 to {MAX_CHOICES} choices, got {len(texts)}.", field)
    if not all(texts):
        raise invalid_argument(f"{field} holds an empty choice.", field)
    if sum(len(text.encode()) for text in texts) > MAX_CHOICE_BYTES:
        raise invalid_argument(f"{field}: the choices are longer than {MAX_CHOICE_BYTES} bytes together.", field)


def _check_structural_tags(guide: StructuralTags, field: str) -> None:
    tags, triggers = list(guide.tags), list(guide.triggers)
    if not 1 <= len(tags) <= MAX_TAGS:
        raise invalid_argument(f"{field} must hold 1 to {MAX_TAGS} tags, got {len(tags)}.", field)
    if not 1 <= len(triggers) <= MAX_TRIGGERS:
        raise invalid_argument(f"{field} must hold 1 to {MAX_TRIGGERS} triggers, got {len(triggers)}.", field)
    if not all(1 <= len(trigger.encode()) <= MAX_TRIGGER_BYTES for trigger in triggers):
        raise invalid_argument(f"{field}: a trigger must have 1 to {MAX_TRIGGER_BYTES} bytes.", field)
    if any(one in other for i, one in enumerate(triggers) for j, other in enumerate(triggers) if i != j):
        raise invalid_argument(f"{field}: a trigger must not contain another one.", field)
    total = _Multiples()
    for tag in tags:
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise invalid_argument(f"{field}: every tag must begin with a trigger.", field)
        if max(len(tag.begin.encode()), len(tag.end.encode())) > MAX_TAG_BYTES:
            raise invalid_argument(f"{field}: a tag's begin or end is longer than {MAX_TAG_BYTES} bytes.", field)
        if guide.json_schema and not (tag.json_schema or tag.end):
            continue
        total.values |= _check_schema(tag.json_schema, field).values
        if not tag.json_schema.lstrip().startswith("{"):
            raise invalid_argument(f"{field}: the schema must be a JSON object.", field)
    if guide.json_schema:
        total.values |= _check_schema(guide.json_schema, field).values
    total.check(field)
    for trigger in triggers:
        if not any(tag.begin.startswith(trigger) for tag in tags):
            raise invalid_argument(f"{field}: no tag begins with the trigger {trigger!r}.", field)
    schemas = [guide.json_schema, *(tag.json_schema for tag in tags)]
    if sum(len(schema.encode()) for schema in schemas) > MAX_SCHEMA_BYTES:
        raise invalid_argument(f"{field}: the schemas are longer than {MAX_SCHEMA_BYTES} bytes together.", field)


def _check_pattern(text: str, form: str, field: str) -> None:
    if not text:
        raise invalid_argument(f"{field} is empty.", field)
    if len(text.encode()) > MAX_PATTERN_BYTES:
        raise invalid_argument(f"{field} is longer than {MAX_PATTERN_BYTES} bytes.", field)
    if form == "grammar" and "%json" in text:
        # A schema inside a grammar would bypass the checks of a schema.
        raise invalid_argument(f"{field} holds %json: give the schema as a JSON schema instead.", field)
