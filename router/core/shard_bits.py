"""Shards as bits of an int, so that one operation serves all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Final

_TRUTH: Final = bytes.maketrans(b"01", b"\0\1")


class ShardBits:
    """A bit is allocated to a shard, retired when nothing new is to carry it, and freed when nothing old does."""

    def __init__(self) -> None:
        self.all = 0
        """The bits of all shards, without the retired ones."""
        self._shard_ids: list[str] = []
        """Number of the bit → shard_id ("" = retired or free)."""
        self._shard_id_of: dict[int, str] = {}
        self._free: list[int] = []

    def allocate(self, shard_id: str) -> int:
        if self._free:
            bit = self._free.pop()
            self._shard_ids[bit.bit_length() - 1] = shard_id
        else:
            bit = 1 << len(self._shard_ids)
            self._shard_ids.append(shard_id)
        self._shard_id_of[bit] = shard_id
        self.all |= bit
        return bit

    def retire(self, bit: int) -> None:
        del self._shard_id_of[bit]
        self._shard_ids[bit.bit_length() - 1] = ""
        self.all ^= bit

    def free(self, bits: int) -> None:
        """Retired bits, to be allocated again."""
        while bits:
            bit = bits & -bits
            self._free.append(bit)
            bits ^= bit

    def by_shard(self, stretches: Sequence[tuple[int, int]]) -> dict[str, int]:
        """Of (bits, number) the number of each shard."""
        numbers: dict[str, int] = {}
        shard_id_of = self._shard_id_of
        for bits, number in stretches:
            shard_id = shard_id_of.get(bits)
            if shard_id is not None:
                numbers[shard_id] = number
            else:
                # Bit by bit is ten times slower when they are many.
                chosen = f"{bits:b}"[::-1].encode().translate(_TRUTH)
                numbers.update(dict.fromkeys(compress(self._shard_ids, chosen), number))
        return numbers

    def check_integrity(self, shards: Sequence[tuple[str, int]]) -> None:
        """Assert that these (shard_id, bit) are all there are, and no bit is used twice."""
        assert {bit: shard_id for shard_id, bit in shards} == self._shard_id_of
        assert sum(self._shard_id_of) == self.all
        for bit, shard_id in self._shard_id_of.items():
            assert self._shard_ids[bit.bit_length() - 1] == shard_id
        assert not any(bit & self.all for bit in self._free)
        assert len(set(self._free)) == len(self._free)
