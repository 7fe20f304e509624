"""Represents shards as bits of an int, so that one operation serves all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Final

_TRUTH: Final = bytes.maketrans(b"01", b"\0\1")


class ShardBits:
    """A bit is allocated to a shard, retired when no block may get it any more, and freed when it is set nowhere."""

    def __init__(self) -> None:
        self.all = 0
        """The bits of all shards, without the retired ones."""
        self.bit_of: list[int] = []
        """`1 << number`, by number."""
        self.shard_id_of: list[str] = []
        """By number; "" for a bit that is retired or free."""
        self._free: list[int] = []

    def allocate(self, shard_id: str) -> int:
        if self._free:
            bit = self._free.pop()
            self.shard_id_of[bit.bit_length() - 1] = shard_id
        else:
            bit = 1 << len(self.bit_of)
            self.bit_of.append(bit)
            self.shard_id_of.append(shard_id)
        self.all |= bit
        return bit

    def retire(self, bit: int) -> None:
        self.shard_id_of[bit.bit_length() - 1] = ""
        self.all ^= bit

    def free(self, bits: int) -> None:
        """Make retired bits available again."""
        while bits:
            bit = bits & -bits
            self._free.append(bit)
            bits ^= bit

    def shard_ids(self, bits: int) -> Iterable[str]:
        """The shards of several bits, found by the digits of the number: clearing bits one by one is ten times
        slower."""
        return compress(self.shard_id_of, f"{bits:b}"[::-1].encode().translate(_TRUTH))

    def check_integrity(self, shards: Sequence[tuple[str, int]]) -> None:
        """Assert that these (shard_id, bit) are all there are, and no bit is used twice."""
        used = {bit: shard_id for bit, shard_id in zip(self.bit_of, self.shard_id_of, strict=True) if shard_id}
        assert {bit: shard_id for shard_id, bit in shards} == used
        assert sum(used) == self.all
        assert not used.keys() & set(self._free)
        assert len(set(self._free)) == len(self._free)
