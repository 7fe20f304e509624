"""The fake engine's KV cache: blocks, reused by content and salt, with events in TensorRT-LLM's format."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

Parent = int | None


class EventBuffer:
    """Bounded; a drain takes everything. `window_sizes`: the same blocks are reported once per attention window, the
    largest first, and smaller ones under identities of their own. With `hexadecimal` identities there are two groups of
    layers with the largest window, and one for each other window; the identities are the same for all of them."""

    def __init__(
        self, max_size: int, window_sizes: Sequence[int], rank: int | None, *, hexadecimal: bool = False
    ) -> None:
        self.max_size = max_size
        self.window_sizes = (window_sizes[0], *window_sizes) if hexadecimal else window_sizes
        self.hexadecimal = hexadecimal
        self.rank = rank
        self.next_id = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=max(1, max_size))

    def add(self, data: dict[str, Any]) -> None:
        for offset, window_size in enumerate(self.window_sizes):
            event: dict[str, Any] = {"event_id": self.next_id, "window_size": window_size}
            event["data"] = _in_hexadecimal(data) if self.hexadecimal else _shift(data, offset)
            if self.hexadecimal:
                event |= {"layer_group_id": offset, "hash_algo": "v2_sha256"}
            if self.rank is not None:
                event["attention_dp_rank"] = self.rank
            self.next_id += 1
            if self.max_size:
                self._events.append(event)

    def drain(self) -> list[dict[str, Any]]:
        events = list(self._events)
        self._events.clear()
        return events


def _in_hexadecimal(data: dict[str, Any]) -> dict[str, Any]:
    found = dict(data)
    if data["type"] == "stored":
        parent = data["parent_hash"]
        found["parent_hash"] = None if parent is None else f"{parent:064x}"
        found["blocks"] = [block | {"block_hash": f"{block['block_hash']:064x}"} for block in data["blocks"]]
    elif data["type"] == "removed":
        found["block_hashes"] = [f"{identity:064x}" for identity in data["block_hashes"]]
    return found


def _shift(data: dict[str, Any], offset: int) -> dict[str, Any]:
    """The identities of another window's blocks."""
    if not offset:
        return data
    shifted = dict(data)
    if data["type"] == "stored":
        parent = data["parent_hash"]
        shifted["parent_hash"] = None if parent is None else parent + offset
        shifted["blocks"] = [block | {"block_hash": block["block_hash"] + offset} for block in data["blocks"]]
    elif data["type"] == "removed":
        shifted["block_hashes"] = [identity + offset for identity in data["block_hashes"]]
    return shifted


class _Cached:
    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.num_references = 0
        self.num_children = 0


class BlockCache:
    """Counts blocks; holds no KV. `tells_salts`: newer versions' events."""

    def __init__(
        self, num_blocks: int, block_size: int, events: EventBuffer, *, reuse: bool, tells_salts: bool
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.events = events
        self.reuse = reuse
        self.tells_salts = tells_salts
        self._cached: OrderedDict[int, _Cached] = OrderedDict()
        self._num_private = 0
        events.add({"type": "created", "num_blocks_per_cache_level": [num_blocks, 0]})

    @property
    def num_used(self) -> int:
        return self._num_private + sum(1 for block in self._cached.values() if block.num_references)

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    def identities(self, token_ids: Sequence[int], salt: Any) -> list[int]:
        """Of full blocks and of the partial last one. Multiples of 8, which leaves room for other windows'."""
        found: list[int] = []
        parent: Any = salt
        for start in range(0, len(token_ids), self.block_size):
            parent = hash((parent, tuple(token_ids[start : start + self.block_size]))) & 0xFFFFFFFFFFFFFFF8
            found.append(parent)
        return found

    def admit(self, token_ids: Sequence[int], salt: Any, num_total_blocks: int) -> list[int] | None:
        """The reused blocks of a request that will need so many in the end; None: they are not free."""
        reusable: list[int] = []
        if self.reuse:
            num_full = (len(token_ids) - 1) // self.block_size
            for identity in self.identities(token_ids, salt)[:num_full]:
                if identity not in self._cached:
                    break
                reusable.append(identity)
        num_new = num_total_blocks - len(reusable)
        num_idle_reused = sum(1 for identity in reusable if not self._cached[identity].num_references)
        if num_new + num_idle_reused > self.num_free:
            return None
        self._reference(reusable)
        self._num_private += num_new
        self._evict()
        return reusable

    def store(self, token_ids: Sequence[int], salt: Any, referenced: list[int], *, last: bool) -> None:
        """Make a request's blocks reusable: full ones, and with its end the partial one. `referenced` grows."""
        if not self.reuse:
            return
        blocks: list[dict[str, Any]] = []
        parent: Parent = referenced[-1] if referenced else None
        first_parent = parent
        for number, identity in enumerate(self.identities(token_ids, salt)):
            if number < len(referenced):
                continue
            tokens = token_ids[number * self.block_size : (number + 1) * self.block_size]
            if (len(tokens) < self.block_size and not last) or identity in self._cached:
                break
            self._cached[identity] = block = _Cached(parent)
            if parent is not None and parent in self._cached:
                self._cached[parent].num_children += 1
            if len(tokens) == self.block_size:
                block.num_references = 1
                self._num_private -= 1
                referenced.append(identity)
            blocks.append(self._block(identity, tokens, salt))
            parent = identity
        if blocks:
            self.events.add({"type": "stored", "parent_hash": first_parent, "blocks": blocks})

    def release(self, referenced: Sequence[int], num_total_blocks: int) -> None:
        self._num_private -= num_total_blocks - len(referenced)
        for identity in referenced:
            if identity in self._cached:
                self._cached[identity].num_references -= 1
        self._evict()

    def restart(self) -> None:
        """The cache is new: ids from 0."""
        self._cached.clear()
        self.events.drain()
        self.events.next_id = 0
        self.events.add({"type": "created", "num_blocks_per_cache_level": [self.num_blocks, 0]})

    def _block(self, identity: int, tokens: Sequence[int], salt: Any) -> dict[str, Any]:
        block = {
            "type": "stored_block",
            "block_hash": identity,
            "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
            "cache_level": 0,
            "priority": 35,
        }
        return block | {"cache_salt": salt} if self.tells_salts else block

    def _reference(self, identities: Sequence[int]) -> None:
        for identity in identities:
            self._cached[identity].num_references += 1
            self._cached.move_to_end(identity)

    def _evict(self) -> None:
        while self._num_private + len(self._cached) > self.num_blocks:
            victim = next(
                identity
                for identity, block in self._cached.items()
                if not block.num_references and not block.num_children
            )
            parent = self._cached.pop(victim).parent
            if parent is not None and parent in self._cached:
                self._cached[parent].num_children -= 1
            self.events.add({"type": "removed", "block_hashes": [victim]})
