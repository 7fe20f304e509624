"""The texts of files that requests give to a model. What must be parsed is parsed once, and few files at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from kvloom.errors import KvloomError, invalid_argument
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.limits.scoped_cache import ScopedCache
from orchestrator.search import extraction
from orchestrator.search.extraction import UnreadableError

MAX_TEXT_CHARS: Final = 4 * 2**20
"""More would fit the window of no model."""
READ_SECONDS: Final = 20.0
"""How long a request waits for a file to be parsed."""
_KEPT_SECONDS: Final = 600.0
_MAX_KEPT_BYTES: Final = 64 * 2**20
_MAX_KEPT: Final = 1024
_NUM_PARSERS: Final = 2
_MAX_OF_TENANT: Final = 8


class FileTexts:
    """Texts are kept for their tenants for some minutes: a conversation has the same files in each turn."""

    def __init__(self) -> None:
        self._kept = ScopedCache[tuple[str, str], str](_MAX_KEPT_BYTES, _MAX_KEPT, lambda text: 4 * len(text))
        self._parsers = asyncio.Semaphore(_NUM_PARSERS)
        self._asked = Counter[str]()

    async def text_of(self, tenant: str, key: str, name: str, read: Callable[[], Awaitable[bytes]], now: float) -> str:
        """`key`: what names the content among those of the tenant. `read` is called for the content if its text is not
        known. Raises KvloomError (INVALID_ARGUMENT, ORCHESTRATOR_UNAVAILABLE)."""
        text = self._kept.get((tenant, key), now)
        if text is not None:
            return text
        if self._asked[tenant] >= _MAX_OF_TENANT:
            message = "Too many files are being read at the moment."
            raise KvloomError(
                ErrorReason.ERROR_REASON_ORCHESTRATOR_UNAVAILABLE, message, field="file", retry_after_seconds=1.0
            )
        self._asked[tenant] += 1
        try:
            async with self._parsers:
                text = await extraction.text_of(name, await read(), READ_SECONDS)
        except UnreadableError as error:
            raise invalid_argument(str(error), "file") from error
        finally:
            self._asked[tenant] -= 1
            if not self._asked[tenant]:
                del self._asked[tenant]
        if not text.strip():
            raise invalid_argument("The file has no text; scanned pages and images are not read.", "file")
        if len(text) > MAX_TEXT_CHARS:
            raise invalid_argument(f"The file has more than {MAX_TEXT_CHARS} characters of text.", "file")
        self._kept.put((tenant, key), text, tenant, now + _KEPT_SECONDS)
        return text
