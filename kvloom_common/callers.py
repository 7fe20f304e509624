"""Who sends a request: the holder of a credential, or else an address. Callers are isolated from one another: each has
its own prefix cache, its own names of requests, and its own share of the fabric."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvloom.errors import invalid_argument
from kvloom_common.access.api_keys import ApiKeys, missing_key_error, wrong_key_error
from kvloom_common.access.auth_provider import CallerVerifier, configured_verifier
from kvloom_common.access.kv_shares import CacheSalts
from kvloom_common.config import KvloomConfig
from kvloom_common.process.watched_files import Watcher
from kvloom_common.trust.fabric_trust import NO_SECRET, FabricTrust

if TYPE_CHECKING:
    from kvloom_common.access.identities import Identities

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
        identities: Identities | None = None,
    ) -> None:
        """`key`: at most 64 bytes. With `anonymous_share`, all requests without a credential are one caller's. With
        `api_keys`, only their holders are served. With `verifier`, only those are served to whom it gives an id, which
        must be awaited: `check` does not ask it. With `identities`, only those who belong to a tenant, whose id is then
        the caller's name; `check` does not ask them either."""
        self._key = key
        self._anonymous_share = anonymous_share
        self.api_keys = api_keys
        self.verifier = verifier
        self.identities = identities

    @property
    def are_authenticated(self) -> bool:
        """True when not everyone may call."""
        return self.api_keys is not None or self.verifier is not None or self.identities is not None

    @property
    def watched(self) -> Watcher | None:
        """The watcher to run while callers are served (kvloom_common/process/watched_files.py); None: there is nothing
        to follow."""
        return self.identities or self.api_keys or self.verifier

    def cache_salts(self, key: bytes = b"") -> CacheSalts:
        """Returns the salts that separate these callers in caches. `key`: see CacheSalts; without one, the salts are
        for this process alone."""
        return CacheSalts(key, None if self.identities is None else self.identities.tenants.cache_scope)

    def guardrails(self, caller: str, named: Sequence[str] | None) -> Sequence[str]:
        """The rules of the safety policy that hold for a request besides those that hold anyway: those that its caller
        has chosen, and those that it names."""
        chosen = () if self.identities is None else self.identities.tenants.guardrails(caller)
        return tuple(dict.fromkeys((*chosen, *(named or ())))) if chosen else named or ()

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


def require_one_of_each(headers: Iterable[tuple[str, str]]) -> None:
    """Raises KvloomError (INVALID_ARGUMENT) if one of these headers (names and values) by which callers are told apart
    is there more than once, with different values. Which of them counts would depend on who reads them: a proxy, an
    edge or a router. (`authorization` and `x-api-key` together are fine: `bare_credential` says which counts, and some
    clients send both.)"""
    found: dict[str, str] = {}
    for name, value in headers:
        if found.setdefault(name, value) != value:
            raise invalid_argument(f"The request has several different values of {name[:64]!r}: send one.", name[:64])


def configured_callers(config: KvloomConfig, trust: FabricTrust = NO_SECRET, own_name: str = "") -> Callers:
    """The callers of an edge or a router called `own_name`. Raises ConfigError if the file of API keys, the auth
    provider or the settings of tenants cannot be used."""
    if not config.control.enabled:
        return _without_tenants(config, trust.caller_key)
    # Only here, because a fabric without tenants needs nothing of it.
    from kvloom_common.access.identities import Identities

    return Callers(trust.caller_key, identities=Identities(config, own_name, trust))


def configured_scrapers(config: KvloomConfig) -> Callers:
    """Who may read the metrics of other processes than edges. Tenants may not: with `control.enabled`, the keys in
    `callers.api_keys_file` are for this alone. Raises ConfigError."""
    return _without_tenants(config, b"")


def _without_tenants(config: KvloomConfig, key: bytes) -> Callers:
    file = config.callers.api_keys_file
    api_keys = ApiKeys.from_file(Path(file)) if file else None
    verifier = configured_verifier(config.callers)
    anonymous_share = config.callers.anonymous == "shared"
    return Callers(key, anonymous_share=anonymous_share, api_keys=api_keys, verifier=verifier)
