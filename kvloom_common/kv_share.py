"""A guaranteed share of the KV blocks of each shard, as a request carries it to the engine."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_KV_SHARES_PERCENT: Final = 90
"""All shares together. The rest of the blocks is for everything that has no share, and keeps shards able to run it."""


class KvShare(msgspec.Struct, frozen=True):
    """The share of one owner: a project, or an organisation for those of its projects that have none of their own."""

    owner: int
    """64 bits that stand for the owner and tell nothing about it: see kvloom_common/access/kv_shares.py."""
    percent: int
    """The share in percent of a shard's blocks; at least 1."""
