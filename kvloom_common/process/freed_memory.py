"""Returns freed memory to the system: the C library keeps what lies between live objects."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

_C_LIBRARY: Final = ctypes.CDLL(None)
_trim: Final[Callable[[int], Any] | None] = getattr(_C_LIBRARY, "malloc_trim", None)
"""Only glibc has it."""


def return_freed_memory() -> None:
    """Takes some milliseconds per 100 MB, in which other threads run. Does nothing where the C library has no such
    call."""
    if _trim is not None:
        _trim(0)
