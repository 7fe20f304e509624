"""Who sends a request: the holder of a credential, or else an address. Callers are isolated from one another: each has
its own prefix cache, its own names of requests, and its own share of the fabric."""

from __future__ import annotations

import hashlib

from kvloom.config import KvloomConfig

_DIGEST_BYTES = 12


class Callers:
    """Names callers. The names are the same in all processes that have the same key, and reveal nothing without it."""

    def __init__(self, key: bytes = b"", *, anonymous_share: bool = False) -> None:
        """`key`: at most 64 bytes. With `anonymous_share`, all requests without a credential are one caller's."""
        self._key = key
        self._anonymous_share = anonymous_share

    def name(self, credential: str, address: str) -> str:
        """The caller's name. `credential`: the Authorization header or metadata, "" if there is none. `address`: the
        IP address that the request came from, without its port. Empty for anonymous callers that share."""
        if credential:
            return f"key-{self._digest(credential)}"
        return "" if self._anonymous_share else f"address-{self._digest(address)}"

    def _digest(self, text: str) -> str:
        content = text.encode("utf-8", "surrogateescape")
        return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=self._key).hexdigest()


def configured_callers(config: KvloomConfig, key: bytes = b"") -> Callers:
    """`key`: see FabricTrust.caller_key."""
    return Callers(key, anonymous_share=config.callers.anonymous == "shared")
