"""Values are checked against what guides cannot follow of their schemas."""

from __future__ import annotations

from typing import Any

import pytest

from kvloom_common.json_schema.schema_check import conforms


@pytest.mark.parametrize(
    ("schema", "value", "conforming"),
    [
        ({"uniqueItems": True}, [1, 2, {"a": 1}], True),
        ({"uniqueItems": True}, [{"a": 1, "b": 2}, {"b": 2, "a": 1}], False),
        ({"uniqueItems": False}, [1, 1], True),
        ({"contains": {"type": "string"}}, [1, "a"], True),
        ({"contains": {"type": "string"}}, [1], False),
        ({"contains": {"type": "string"}, "minContains": 0}, [1], True),
        ({"contains": {"type": "string"}, "maxContains": 1}, ["a", "b"], False),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}, False),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"c": 1}, True),
        ({"if": {"required": ["a"]}, "else": {"required": ["b"]}}, {"c": 1}, False),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, False),
        ({"dependentRequired": {"a": ["b"]}}, {"b": 1}, True),
        ({"propertyNames": {"maxLength": 2}}, {"abc": 1}, False),
        ({"propertyNames": {"enum": ["a"]}}, {"a": 1}, True),
    ],
)
def test_what_is_said_of_a_value_as_a_whole(schema: Any, value: Any, conforming: bool) -> None:
    """A call that breaks it is found when it has ended."""
    assert conforms(value, schema) is conforming
