"""docs/operate/safety.md says of every place in which a client can write text if it is screened."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import msgspec

import edge_http.anthropic
import edge_http.formatting
import edge_http.openai
from edge_http.server.routes import ROUTES
from tests.text_positions import INSIDE, PAGE, page_with_table

HEADS = frozenset({"_Kind", "_ToolType"})
"""Structs that only tell which other struct decodes a part."""


def test_the_table_of_positions_derives_from_the_requests() -> None:
    """A hand-kept list would forget the next field (`python -m tests.text_positions`)."""
    page = PAGE.read_text()
    assert page == page_with_table(page)


def test_the_table_knows_what_is_decoded_later() -> None:
    """A part of a body that is decoded by itself has texts, too."""
    known = {struct for structs in INSIDE.values() for struct in structs}
    known |= {route.body for route in ROUTES}
    found: set[type] = set()
    for package in (edge_http.anthropic, edge_http.formatting, edge_http.openai):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for value in vars(importlib.import_module(module.name)).values():
                kind: Any = value.type if isinstance(value, msgspec.json.Decoder) else None
                if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                    found.add(kind)
    assert found
    assert {each for each in found if each.__name__ not in HEADS} <= known
