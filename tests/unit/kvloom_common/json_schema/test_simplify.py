"""Schemas become what guides can follow; what cannot be followed is dropped, or refused by path and keyword."""

from __future__ import annotations

from typing import Any

import pytest

from kvloom_common.json_schema.simplify import UnfollowableSchema, simplified

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED_CITY = CITY | {"additionalProperties": False}
UNIT = {"properties": {"unit": {"type": "string"}}}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (CITY, CLOSED_CITY),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": CITY}, {"type": "array", "items": CLOSED_CITY}),
        ({"anyOf": [CITY, {"type": "null"}]}, {"anyOf": [CLOSED_CITY, {"type": "null"}]}),
        (
            {"allOf": [CITY, UNIT]},
            CLOSED_CITY | {"properties": {"city": {"type": "string"}, "unit": {"type": "string"}}},
        ),
        ({"allOf": [{"$ref": "#/$defs/city"}], "title": "A", "$defs": {"city": CITY}}, CLOSED_CITY),
        (CITY | {"required": ["city", "x"]}, None),
    ],
)
def test_objects_that_name_their_properties_are_closed(schema: Any, closed: Any) -> None:
    """Wherever they stand, and however they are put together: small models add properties without end."""
    found = simplified(schema)
    if closed is None:
        closed = CLOSED_CITY | {"properties": CITY["properties"] | {"x": {}}, "required": ["city", "x"]}
    assert (found.definitions.get("d0") if "$ref" in str(found.schema) else found.schema) == closed
    assert found.losses == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        CLOSED_CITY,
        CITY | {"additionalProperties": {}},
        CITY | {"additionalProperties": {"type": "integer"}},
        CITY | {"patternProperties": {"^x": {}}},
        CITY | {"minProperties": 2},
        {"enum": [CITY]},
        {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
    ],
)
def test_schemas_that_speak_of_other_properties_stay_open(schema: Any) -> None:
    """They mean them."""
    assert simplified(schema).whole() == schema


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        (
            {"type": ["string", "null"], "maxLength": 3},
            {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        ),
        ({"pattern": "^a$"}, {"type": "string", "pattern": "^a$"}),
        ({"const": 1}, {"enum": [1]}),
        ({"type": "string", "enum": ["a", 1, None]}, {"enum": ["a"]}),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, {"type": "integer", "exclusiveMinimum": 1}),
        ({"type": "string", "format": "password"}, {"type": "string"}),
        ({"type": "string", "format": "date-time", "maxLength": 12}, {"type": "string", "maxLength": 12}),
        (
            {"items": [{"type": "string"}], "additionalItems": False},
            {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        ),
        ({"type": "object", "properties": None, "required": None}, {"type": "object"}),
        (
            CITY | {"anyOf": [{"required": ["city"]}, UNIT]},
            {
                "anyOf": [
                    CLOSED_CITY,
                    CLOSED_CITY | {"properties": {"city": {"type": "string"}, "unit": {"type": "string"}}},
                ]
            },
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "null"}},
            {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False},
        ),
        (
            CITY | {"unevaluatedProperties": False},
            CLOSED_CITY,
        ),
    ],
)
def test_what_older_drafts_and_libraries_write_is_said_in_the_present_form(schema: Any, wanted: Any) -> None:
    """Compilers know one form of each."""
    assert simplified(schema).whole() == wanted


@pytest.mark.parametrize(
    ("schema", "path", "keyword"),
    [
        ({"properties": {"ids": {"type": "array", "uniqueItems": True}}}, ".properties.ids", "uniqueItems"),
        ({"items": {"anyOf": [{"type": "null"}, {"type": "array", "contains": {}}]}}, ".items.anyOf[1]", "contains"),
        ({"properties": {"p": {"pattern": "(?!x)"}}}, ".properties.p", "pattern"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"if": {}, "then": {"type": "null"}}}}, ".$defs.a", "if"),
        ({"$ref": "https://example.org/x"}, "", "$ref"),
        ({"type": "any"}, "", "type"),
        ({"properties": {"a": {"minLength": 3, "maxLength": 2}}}, ".properties.a", "minLength"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "", "type"),
        ({"required": ["a"], "additionalProperties": False}, "", "required"),
        ({"enum": [1], "type": "string"}, "", "enum"),
        ({"properties": {"n": {"multipleOf": 65537}}}, ".properties.n", "multipleOf"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_path_and_keyword(schema: Any, path: str, keyword: str) -> None:
    """The author of a schema has to find it; a compiler's messages do not say where."""
    with pytest.raises(UnfollowableSchema) as caught:
        simplified(schema)
    assert (caught.value.loss.path, caught.value.loss.keyword) == (path, keyword)
    assert simplified(schema, is_lenient=True).losses[0].keyword == keyword


@pytest.mark.parametrize(
    "schema", [{}, {"type": "string"}, {"properties": {}}, {"enum": [1]}, {"$ref": "#/x"}, {"type": 7}]
)
def test_the_arguments_of_a_tool_are_an_object(schema: Any) -> None:
    """Whatever the schema says, or does not: a call whose arguments are an array is none."""
    assert simplified(schema, is_lenient=True, of_arguments=True).whole()["type"] == "object"


def test_names_of_documents_and_anchors_are_followed() -> None:
    """`$id` names the schema; a reference by that name stays within it."""
    schema = {
        "$id": "https://example.org/t.json",
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/a"}, {"$ref": "t.json#/$defs/a"}, {"$ref": "other.json"}, {"$ref": "#here"}],
        "$defs": {"a": {"type": "null"}, "b": {"$id": "other.json", "type": "boolean"}, "c": {"$anchor": "here"}},
    }
    found = simplified(schema)
    targets = [found.definitions[each["$ref"].rpartition("/")[2]] for each in found.whole()["prefixItems"]]
    assert targets == [{"type": "null"}, {"type": "null"}, {"type": "boolean"}, {}]


def test_the_work_is_bounded() -> None:
    """References within combinations multiply: forty levels would be 2^40 parts."""
    level: dict[str, Any] = {
        f"l{i}": {"properties": {"p": both(f"l{i + 1}"), "q": both(f"l{i + 1}")}} for i in range(40)
    }
    schema = {**both("l0"), "$defs": {**level, "l40": {}}}
    with pytest.raises(UnfollowableSchema):
        simplified(schema)
    assert simplified(schema, is_lenient=True, of_arguments=True).schema == {"type": "object"}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"p{i}": {"type": "string", "pattern": "[a-z]" * 600} for i in range(100)}},
        {"enum": [f"value {i}" for i in range(50_000)]},
    ],
)
def test_long_patterns_and_enumerations_count_as_work(schema: dict[str, Any]) -> None:
    """An edge simplifies a schema between two tokens of other tenants' streams."""
    with pytest.raises(UnfollowableSchema, match="too complex"):
        simplified(schema)


def both(name: str) -> dict[str, Any]:
    return {"allOf": [{"$ref": f"#/$defs/{name}"}, {"minProperties": 0}]}


def test_what_is_simple_stays_as_it_is() -> None:
    """A guide is simplified where it is made and where it is compiled."""
    schema = {"type": "object", "properties": {"a": {"oneOf": [CITY, {"pattern": r"^\cA[^]{$"}]}, "b": {"$ref": "#"}}}
    once = simplified(schema).whole()
    assert simplified(once).whole() == once
