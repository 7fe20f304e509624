"""KvShares are the guaranteed shares of callers in the KV blocks of shards, as routers send them
(docs/operate/kv-shares.md). CacheSalts separates callers in the prefix cache, in every tier of it, and in the caches of
texts and guides.

A router seeds the hashes of a request's blocks with a salt, and gives it to the shard. Whoever could guess the salt of
another caller could also compute the hashes of that caller's prompts, so a salt is an HMAC with a key that only the
processes of the fabric have.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Final

from kvloom_common.kv_share import KvShare

_MAX_KEPT: Final = 4096
"""Shares. At any time there are at most 90 of at least 1%."""
_OWNER_BYTES: Final = 8
_MAX_KEY_BYTES: Final = 64


class KvShares:
    """All routers of a fabric give an owner the same number. It follows from a key that only they have, so that shards
    and what they tell the outside reveal no account."""

    def __init__(self, key: bytes, percent_of: Callable[[str], tuple[str, int]]) -> None:
        """`key`: see FabricTrust.cache_key; without one, the numbers are hashes of names. `percent_of` gives the
        account whose share a caller's requests have, and the share; 0: they have none."""
        self._key = key[:_MAX_KEY_BYTES]
        self._percent_of = percent_of
        self._kept: dict[tuple[str, int], KvShare] = {}

    def of(self, caller: str) -> KvShare | None:
        """The share of a caller's requests; callers are those of kvloom_common/callers.py."""
        found = self._percent_of(caller)
        if not found[1]:
            return None
        share = self._kept.get(found)
        if share is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            share = self._kept[found] = KvShare(self._owner(found[0]), found[1])
        return share

    def _owner(self, account: str) -> int:
        name = account.encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(name, digest_size=_OWNER_BYTES, key=self._key, person=b"kv share").digest()
        return int.from_bytes(digest, "little")


_MAX_SALTS: Final = 65_536
"""Salts. Computing one takes about two microseconds."""
_SALT_CHARS: Final = 32


class CacheSalts:
    """Gives every caller a salt: its own, or that of its cache scope. All routers of a fabric give the same ones."""

    def __init__(self, key: bytes, scope_of: Callable[[str], str] | None = None) -> None:
        """`key`: see FabricTrust.cache_key; without one, names are salts. `scope_of` gives the cache scope of a caller,
        "" if it shares with nobody; None: nobody shares."""
        self._key = key
        self._scope_of = scope_of
        self._kept: dict[str, str] = {}

    def of(self, caller: str) -> str:
        """The salt of a caller's requests; callers are those of kvloom_common/callers.py."""
        if self._scope_of is not None and (scope := self._scope_of(caller)):
            return self._of_name(f"scope\0{scope}")  # no caller's name has this character
        return self._of_name(caller)

    def of_all_times(self, caller: str) -> set[str]:
        """The salts of a caller's requests now, and whenever it shares with nobody."""
        return {self.of(caller), self._of_name(caller)}

    def _of_name(self, name: str) -> str:
        if not self._key:
            return name
        salt = self._kept.get(name)
        if salt is None:
            if len(self._kept) >= _MAX_SALTS:
                self._kept.clear()
            digest = hmac.digest(self._key, name.encode("utf-8", "surrogateescape"), hashlib.sha256)
            salt = self._kept[name] = digest.hex()[:_SALT_CHARS]
        return salt
