"""Which Python this is: most of what edge and router cost is its work, and how it was compiled counts."""

from __future__ import annotations

import platform
import sys
import sysconfig
from typing import Final

_OPTIMIZED: Final = "--enable-optimizations"
"""An argument of CPython's `configure`: profile-guided optimization."""
_DISTRIBUTION_PREFIX: Final = "/usr"
"""Distributions optimize theirs without saying so in this way."""


def interpreter_name(
    prefix: str = sys.base_prefix, configure_arguments: str | None = sysconfig.get_config_var("CONFIG_ARGS")
) -> str:
    """Its version, and "without --enable-optimizations" where that is known of it."""
    name = f"Python {platform.python_version()}"
    if not configure_arguments or _OPTIMIZED in configure_arguments or prefix == _DISTRIBUTION_PREFIX:
        return name
    return f"{name} (without {_OPTIMIZED})"
