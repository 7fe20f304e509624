"""Limits and checks for guides: the errors that can be found without compiling a guide, for every entry point."""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from kvloom.errors import invalid_argument
from kvloom.v1.generation_pb2 import Guide

GUIDE_FIELD: Final = "sampling.guide"
"""The name of the guide's field in errors of the router and the shards."""
MAX_SCHEMA_BYTES: Final = 64 * 2**10
MAX_SCHEMA_DEPTH: Final = 64
MAX_PATTERN_BYTES: Final = 16 * 2**10
"""The limit for a regular expression or a grammar."""
MAX_CHOICES: Final = 1024
MAX_CHOICE_BYTES: Final = 64 * 2**10
"""The limit for all choices together."""
MAX_MULTIPLE: Final = 10_000
"""The limit for the digits of `multipleOf`, read as an integer: a compiler makes that many states."""


def check_guide(guide: Guide, field: str) -> None:
    """Raise KvloomError (INVALID_ARGUMENT) that names `field`. A guide that passes may still fail to compile."""
    form = guide.WhichOneof("form")
    if form is None:
        raise invalid_argument(f"{field} must hold one of json_object, json_schema, regex, choice and grammar.", field)
    if form == "json_object":
        if not guide.json_object:
            raise invalid_argument(f"{field}.json_object can only be true.", field)
    elif form == "json_schema":
        _check_schema(guide.json_schema, field)
    elif form == "choice":
        _check_choices(list(guide.choice.texts), field)
    else:
        _check_pattern(guide.regex if form == "regex" else guide.grammar, form, field)


def _check_schema(text: str, field: str) -> None:
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise invalid_argument(f"{field}: the schema is longer than {MAX_SCHEMA_BYTES} bytes.", field)
    try:
        schema = json.loads(text, parse_float=Decimal, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"{field}: the schema is not JSON.", field) from error
    if not isinstance(schema, dict | bool):
        raise invalid_argument(f"{field}: the schema must be a JSON object.", field)
    _check_node(schema, field, MAX_SCHEMA_DEPTH)


def _check_node(node: Any, field: str, levels_left: int) -> None:
    if not levels_left:
        raise invalid_argument(f"{field}: the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels.", field)
    if isinstance(node, list):
        for child in node:
            _check_node(child, field, levels_left - 1)
    elif isinstance(node, dict):
        multiple = node.get("multipleOf")
        if isinstance(multiple, int | Decimal) and _digits(multiple) > MAX_MULTIPLE:
            raise invalid_argument(f"{field}: multipleOf must not have more digits than {MAX_MULTIPLE}.", field)
        for child in node.values():
            _check_node(child, field, levels_left - 1)


def _digits(number: int | Decimal) -> int:
    """The number without its decimal point: 0.25 → 25, 1500 → 1500."""
    try:
        digits = Decimal(number).normalize().as_tuple()
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


def _check_pattern(text: str, form: str, field: str) -> None:
    if not text:
        raise invalid_argument(f"{field} is empty.", field)
    if len(text.encode()) > MAX_PATTERN_BYTES:
        raise invalid_argument(f"{field} is longer than {MAX_PATTERN_BYTES} bytes.", field)
    if form == "grammar" and "%json" in text:
        # A schema inside a grammar would bypass the checks of a schema.
        raise invalid_argument(f"{field} holds %json: give the schema as a JSON schema instead.", field)
