"""Schemas that do not mention other properties get none."""

from __future__ import annotations

from typing import Any

import pytest

from shard_server.engines.torch_engine.sampling.closed_schema import closed_schema

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED_CITY = CITY | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (CITY, CLOSED_CITY),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": CITY}, {"type": "array", "items": CLOSED_CITY}),
        ({"anyOf": [CITY, {"type": "null"}]}, {"anyOf": [CLOSED_CITY, {"type": "null"}]}),
        (
            {"properties": {"home": {"$ref": "#/$defs/city"}}, "$defs": {"city": CITY}},
            {
                "properties": {"home": {"$ref": "#/$defs/city"}},
                "$defs": {"city": CLOSED_CITY},
                "additionalProperties": False,
            },
        ),
    ],
)
def test_objects_that_name_their_properties_are_closed(schema: Any, closed: Any) -> None:
    """Wherever they stand: clients nest types, and refer to them."""
    assert closed_schema(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        CLOSED_CITY,
        CITY | {"additionalProperties": True},
        CITY | {"additionalProperties": {"type": "integer"}},
        CITY | {"patternProperties": {"^x": {}}},
        CITY | {"minProperties": 2},
        CITY | {"required": ["city", "country"]},
        {"const": CITY},
        {"enum": [CITY]},
        {"allOf": [CITY, {"properties": {"unit": {"type": "string"}}}]},
        {"oneOf": [CITY, {"properties": {"unit": {"type": "string"}}}]},
        CITY | {"anyOf": [{"properties": {"unit": {}}}, {"properties": {"size": {}}}]},
        CITY | {"$ref": "#/$defs/base", "$defs": {"base": {"properties": {"unit": {}}}}},
    ],
)
def test_others_are_left_as_they_are(schema: Any) -> None:
    """A schema that speaks of other properties, or whose parts are about one object, would become another one or one
    that nothing satisfies."""
    assert closed_schema(schema) == schema


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    """Names are not keywords: `items` and `enum` are common names of fields."""
    schema = {"properties": {"items": CITY, "enum": {"type": "string"}, "properties": CITY}}
    wanted = {"items": CLOSED_CITY, "enum": {"type": "string"}, "properties": CLOSED_CITY}
    assert closed_schema(schema) == {"properties": wanted, "additionalProperties": False}
