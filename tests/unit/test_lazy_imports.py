"""What takes seconds to import is imported by the tests that use it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.lazy_imports import SLOW, imported_when_used

TESTS = Path(__file__).resolve().parents[1]


def test_no_file_of_tests_imports_a_slow_library() -> None:
    """Every process of pytest-xdist imports all files before its first test: one line costs each run seconds."""
    slow = re.compile(rf"^(?:import|from) (?:{'|'.join(SLOW)})\b", re.MULTILINE)
    files = [path for path in TESTS.rglob("*.py") if "clients" not in path.parts]
    assert not [str(path.relative_to(TESTS)) for path in files if slow.search(path.read_text())]


def test_a_module_is_imported_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest looks at everything that a file of tests has, which must not import it."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    module = imported_when_used("colorsys")
    assert not hasattr(module, "__test__")
    assert not hasattr(module, "_mock_name")
    assert "colorsys" not in sys.modules
    assert module.rgb_to_hsv(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)
