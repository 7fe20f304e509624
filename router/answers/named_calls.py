"""Calls of `Generate` that their clients can name, so that they can be ended and settled once resumed elsewhere.

A client that gives up on a router, which may still be alive, resumes its answer at another one. Tokens that the first
router metered and the client did not receive are lost, and the second router meters them again. The client therefore
reports how many it received, and the rest is credited (docs/adr/0011), as for the streams of `Connect`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from router.core_driver import CoreDriver
from router.usage_records import UsageRecords


class NamedCalls:
    """The calls of one router, by name (`name_of`)."""

    def __init__(self, driver: CoreDriver, usage_records: UsageRecords) -> None:
        self._driver = driver
        self._usage_records = usage_records
        self._running: dict[str, tuple[str, Callable[[], None]]] = {}
        """Name -> (the call's client id, the function that ends the call)."""

    def open(self, name: str, client_id: str, end: Callable[[], None]) -> None:
        """`end` must end and meter the request before it returns, and may be called more than once."""
        self._running[name] = (client_id, end)
        self._usage_records.open(client_id, name)

    def close(self, name: str, client_id: str) -> None:
        """Called when the call's request has ended."""
        self._usage_records.close(client_id)
        if self._running.get(name, ("", None))[0] == client_id:
            del self._running[name]

    def settle(self, name: str, request_id: str, num_received_tokens: int | None) -> bool:
        """Ends the call if it still runs. If a count is given, credits the tokens that were metered beyond it, whether
        or not the call still ran. Returns False when there was nothing to do."""
        _, end = self._running.get(name, ("", None))
        if end is not None:
            end()
        found = (
            [] if num_received_tokens is None else self._usage_records.settle(name, {request_id: num_received_tokens})
        )
        for credit in found:
            self._driver.tokens_credited(credit)
        return end is not None or bool(found)


def name_of(request_id: str, token: str, caller: str) -> str:
    """Returns a call's name: a digest of everything that a caller has to know. The secrets themselves are not kept, and
    the time that a lookup takes reveals nothing about them."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (request_id, token, caller):
        encoded = part.encode("utf-8", "surrogateescape")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
