"""Who sends a request: the holder of a credential, or else an address. Callers are isolated from one another: each has
its own prefix cache, its own names of requests, and its own share of the fabric."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from kvloom.access.api_keys import ApiKeys, missing_key_error, wrong_key_error
from kvloom.config import KvloomConfig

_DIGEST_BYTES: Final = 12
_BEARER: Final = "bearer "


class Callers:
    """Names callers. The names are the same in all processes that have the same key, and reveal no credential."""

    def __init__(self, key: bytes = b"", *, anonymous_share: bool = False, api_keys: ApiKeys | None = None) -> None:
        """`key`: at most 64 bytes. With `anonymous_share`, all requests without a credential are one caller's. With
        `api_keys`, only their holders are served."""
        self._key = key
        self._anonymous_share = anonymous_share
        self.api_keys = api_keys

    def name(self, credential: str, address: str) -> str:
        """The caller's name. `credential`: as from `bare_credential`, "" if there is none. `address`: the IP address
        that the request came from, without its port. Empty for anonymous callers that share."""
        if credential:
            known = self.api_keys.name_of(credential) if self.api_keys is not None else None
            return f"key-{known or self._digest(credential)}"
        return "" if self._anonymous_share else f"address-{self._digest(address)}"

    def check(self, credential: str) -> None:
        """Raises KvloomError (UNAUTHENTICATED) if API keys are needed and this is none."""
        if self.api_keys is None:
            return
        if not credential:
            raise missing_key_error()
        if self.api_keys.name_of(credential) is None:
            raise wrong_key_error()

    def _digest(self, text: str) -> str:
        content = text.encode("utf-8", "surrogateescape")
        return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=self._key).hexdigest()


def bare_credential(authorization: str, api_key: str) -> str:
    """The credential in the header (or metadata) Authorization, or else in x-api-key: the same one in either."""
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return authorization or api_key


def configured_callers(config: KvloomConfig, key: bytes = b"") -> Callers:
    """`key`: see FabricTrust.caller_key. Raises ConfigError if the file of API keys cannot be used."""
    file = config.callers.api_keys_file
    api_keys = ApiKeys.from_file(Path(file)) if file else None
    return Callers(key, anonymous_share=config.callers.anonymous == "shared", api_keys=api_keys)
