"""The name of the running Python. Most of the CPU time of edge and router is spent in it, so that its build matters."""

from __future__ import annotations

import platform
import sys
import sysconfig
from typing import Final

_OPTIMIZED: Final = "--enable-optimizations"
"""The argument of CPython's `configure` for profile-guided optimization."""
_DISTRIBUTION_PREFIX: Final = "/usr"
"""Distributions optimize their Python without this argument."""


def interpreter_name(
    prefix: str = sys.base_prefix, configure_arguments: str | None = sysconfig.get_config_var("CONFIG_ARGS")
) -> str:
    """Returns the version, with "without --enable-optimizations" if that is known."""
    name = f"Python {platform.python_version()}"
    if not configure_arguments or _OPTIMIZED in configure_arguments or prefix == _DISTRIBUTION_PREFIX:
        return name
    return f"{name} (without {_OPTIMIZED})"
