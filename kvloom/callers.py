"""Who sends a request: the holder of a credential, or else an address. Callers are isolated from one another: each has
its own prefix cache, its own names of requests, and its own share of the fabric."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Final

from kvloom.access.api_keys import ApiKeys, missing_key_error, wrong_key_error
from kvloom.access.auth_provider import CallerVerifier, configured_verifier
from kvloom.config import KvloomConfig
from kvloom.process.watched_files import Watcher

_DIGEST_BYTES: Final = 12
_BEARER: Final = "bearer "
_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Other ids might be mistaken for something else in a log or a request's id."""


class Callers:
    """Names callers. The names are the same in all processes that have the same key, and reveal no credential."""

    def __init__(
        self,
        key: bytes = b"",
        *,
        anonymous_share: bool = False,
        api_keys: ApiKeys | None = None,
        verifier: CallerVerifier | None = None,
    ) -> None:
        """`key`: at most 64 bytes. With `anonymous_share`, all requests without a credential are one caller's. With
        `api_keys`, only their holders are served. With `verifier`, only those are served to whom it gives an id, which
        must be awaited: `check` does not ask it."""
        self._key = key
        self._anonymous_share = anonymous_share
        self.api_keys = api_keys
        self.verifier = verifier

    @property
    def are_authenticated(self) -> bool:
        """Whether not everyone may call."""
        return self.api_keys is not None or self.verifier is not None

    @property
    def watched(self) -> Watcher | None:
        """What needs to be followed while callers are served (kvloom/process/watched_files.py)."""
        return self.verifier if self.api_keys is None else self.api_keys

    def name_of_id(self, verified_id: str) -> str:
        """The name of a caller to whom the verifier has given this id."""
        return f"id-{verified_id}" if _PLAIN_ID.fullmatch(verified_id) else f"hash-{self._digest(verified_id)}"

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
    """`key`: see FabricTrust.caller_key. Raises ConfigError if the file of API keys or the auth provider cannot be
    used."""
    file = config.callers.api_keys_file
    api_keys = ApiKeys.from_file(Path(file)) if file else None
    verifier = configured_verifier(config.callers)
    anonymous_share = config.callers.anonymous == "shared"
    return Callers(key, anonymous_share=anonymous_share, api_keys=api_keys, verifier=verifier)
