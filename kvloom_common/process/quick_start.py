"""Imported first by the entry point of every service, for a quick start and less memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

GC_THRESHOLD: Final = 1_000_000
"""New objects before a collection, while the process starts: a fifth of the CPU time of its imports would go into
looking for garbage, of which they leave none. When the process is ready, `service.settle_memory` sets what holds from
then on."""

gc.set_threshold(GC_THRESHOLD, 10, 10)


@contextmanager
def _hidden(*packages: str) -> Iterator[None]:
    """Make it seem as if `packages` were not installed, unless they have been imported already."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # pyrefly: ignore[no-matching-overload]  # None means that there is no such module
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


# structlog imports rich for tracebacks in colours, and redis OpenTelemetry for its metrics, where they are installed.
# Services use neither: that would be an eighth of their imports.
with _hidden("rich", "opentelemetry"):
    import redis.asyncio  # noqa: F401
    import structlog  # noqa: F401
