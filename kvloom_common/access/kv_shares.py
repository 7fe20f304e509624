"""The guaranteed shares of callers in the KV blocks of shards, as routers send them (docs/operate/kv-shares.md)."""

from __future__ import annotations

import hashlib
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
