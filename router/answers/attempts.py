"""Attempts at answers that their clients can name: to be ended, and settled, when they have gone on elsewhere.

A client that gives a router up, which may live, goes on with its answer at another one. Whatever the first has metered
beyond what came is lost on its way, and the other one meters it again: the client says what came, and the rest is
credited (docs/adr/0011), as for the streams of `Connect`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from router.core_driver import CoreDriver
from router.usage_records import UsageRecords


class Attempts:
    """Those of `Generate`, by name (`name_of`)."""

    def __init__(self, dispatcher: CoreDriver, bills: UsageRecords) -> None:
        self._dispatcher = dispatcher
        self._usage_records = bills
        self._running: dict[str, tuple[str, Callable[[], None]]] = {}
        """The client's id in the dispatcher, and what ends it."""

    def open(self, name: str, client_id: str, end: Callable[[], None]) -> None:
        """`end` must have the request ended, and metered, when it returns. Repeatable."""
        self._running[name] = (client_id, end)
        self._usage_records.open(client_id, name)

    def close(self, name: str, client_id: str) -> None:
        """Its request has ended."""
        self._usage_records.close(client_id)
        if self._running.get(name, ("", None))[0] == client_id:
            del self._running[name]

    def settle(self, name: str, request_id: str, num_received_tokens: int | None) -> bool:
        """End the attempt if it runs. With a count, credit what was metered beyond it, whether or not it still runs.
        False when there was nothing to do."""
        _, end = self._running.get(name, ("", None))
        if end is not None:
            end()
        found = (
            [] if num_received_tokens is None else self._usage_records.settle(name, {request_id: num_received_tokens})
        )
        for credit in found:
            self._dispatcher.credited(credit)
        return end is not None or bool(found)


def name_of(request_id: str, token: str, caller: str) -> str:
    """A digest of all that a caller has to know. Secrets themselves are not kept, and nothing can be learned from how
    long a look-up takes."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (request_id, token, caller):
        encoded = part.encode("utf-8", "surrogateescape")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
