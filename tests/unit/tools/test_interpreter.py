"""Figures that were measured with different builds of Python must be recognisable as such."""

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
def test_a_python_without_optimizations_is_marked(prefix: str, configure_arguments: str | None, name: str) -> None:
    """Distributions optimize their Python in another way. Nothing is added if the build is unknown."""
    assert interpreter_name(prefix, configure_arguments) == name
