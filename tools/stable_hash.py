"""A hash that is the same in every process, for tools that derive data from names."""

from __future__ import annotations

import xxhash


def stable_hash(*parts: object) -> int:
    """Hash the string forms of `parts` to 64 bits."""
    return xxhash.xxh3_64_intdigest("\0".join(map(str, parts)).encode())
