"""Libraries that take seconds to import, which every process of pytest-xdist would do before its first test."""

from __future__ import annotations

import importlib
from typing import Any, Final

SLOW: Final = ("anthropic", "transformers")


class imported_when_used:
    """A module that is imported when a test first asks for something in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for such in everything that a file of tests has
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
