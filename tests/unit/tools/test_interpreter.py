"""Figures of tables that were measured with interpreters of different build must not be compared unawares."""

from __future__ import annotations

import platform

import pytest

from tools.interpreter import interpreter_name

VERSION = f"Python {platform.python_version()}"


@pytest.mark.parametrize(
    ("prefix", "configure_arguments", "name"),
    [
        ("/opt/python", "'--enable-shared'", f"{VERSION} (without --enable-optimizations)"),
        ("/opt/python", "'--enable-optimizations' '--with-lto'", VERSION),
        ("/usr", "'--enable-shared'", VERSION),
        ("/opt/python", None, VERSION),
    ],
)
def test_an_interpreter_that_was_not_optimized_says_so(prefix: str, configure_arguments: str | None, name: str) -> None:
    """Distributions optimize theirs by other means; where nothing is known, nothing is said."""
    assert interpreter_name(prefix, configure_arguments) == name
