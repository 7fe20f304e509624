"""The KV events of vLLM and SGLang, in the hashes of the prefix index. Pure.

A batch is a map (vLLM) or an array (SGLang, earlier vLLM), and so is each event in it. Every stored block comes with
its token ids, from which its own hash follows: engines need not agree about how they hash, nor about a seed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvloom_common.text.block_hash import block_hash, root_hash
from router.core.events import KvChange

_FIELDS: Final[Mapping[str, Sequence[str]]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""By the kind of an event: the names of an array's entries."""


class KvBatch(msgspec.Struct, frozen=True):
    at: float
    """By the engine's clock."""
    events: Sequence[tuple[str, Mapping[str, Any]]]
    """(kind, fields)."""


def batch_in(payload: bytes) -> KvBatch:
    """Raises ValueError if the payload is no batch of events. Kinds of events that are not known are left out."""
    try:
        batch = msgspec.msgpack.decode(payload)
        at, events = (batch["ts"], batch["events"]) if isinstance(batch, dict) else batch[:2]
        return KvBatch(float(at), [event for raw in events for event in _event(raw)])
    except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"it is no batch of KV events: {error!r}") from error


def _event(raw: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    kind = raw["type"] if isinstance(raw, dict) else raw[0]
    if kind in _FIELDS:
        yield kind, raw if isinstance(raw, dict) else dict(zip(_FIELDS[kind], raw[1:], strict=False))


def prefix_salt(adapter: str, cache_salt: str) -> str:
    """Returns what tells prefixes apart whose tokens are the same: the adapter that computes them, "" for none, and the
    salt of the request, with which engines keep tenants apart."""
    return f"{adapter}\0{cache_salt}"


class KvTranslator:
    """The events of one engine. Only blocks on the GPU count, and of a model with several kinds of attention only those
    of the first kind."""

    def __init__(self, block_size: int, max_blocks: int) -> None:
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._hashes: dict[int | bytes, int] = {}
        """By the engine's hash: ours."""

    def changes(self, batch: KvBatch) -> list[KvChange]:
        """Returns what the batch changes. Raises ValueError if it is malformed."""
        changes: list[KvChange] = []
        try:
            for kind, event in batch.events:
                if kind == "AllBlocksCleared":
                    changes.append(self.clear())
                elif (event.get("medium") or "GPU").upper() == "GPU" and not event.get("group_idx"):
                    changes.append(self._stored(event) if kind == "BlockStored" else self._removed(event))
        except (LookupError, TypeError, AttributeError, OverflowError, struct.error) as error:
            raise ValueError(f"a KV event is malformed: {error!r}") from error
        return changes

    def clear(self) -> KvChange:
        """The engine has none of its blocks any more, or it is not known which."""
        self._hashes.clear()
        return KvChange(cleared=True)

    def _stored(self, event: Mapping[str, Any]) -> KvChange:
        size, token_ids, theirs = event["block_size"], event["token_ids"], event["block_hashes"]
        parent, extra_keys = event.get("parent_block_hash"), event.get("extra_keys") or ()
        if size != self._block_size or len(self._hashes) + len(theirs) > self._max_blocks:
            return KvChange()
        if parent is not None:
            ours = self._hashes.get(parent)
            if ours is None:  # its beginning is not known, so that no prompt could be found to have it
                return KvChange()
        else:
            adapter = event.get("lora_name") or ""
            ours = root_hash("", "", prefix_salt(adapter, _salt_in(extra_keys[0] if extra_keys else None, adapter)))
        stored: list[int] = []
        for number, block in enumerate(theirs):
            ours = block_hash(ours, token_ids[number * size : (number + 1) * size])
            if (number or parent is not None) and number < len(extra_keys) and _is_image(extra_keys[number], event):
                ours ^= root_hash(repr(extra_keys[number]))  # the tokens alone do not say what the block has
            self._hashes[block] = ours
            stored.append(ours)
        return KvChange(stored=stored)

    def _removed(self, event: Mapping[str, Any]) -> KvChange:
        found = (self._hashes.pop(block, None) for block in event["block_hashes"])
        return KvChange(removed=[ours for ours in found if ours is not None])


def _salt_in(extra_keys: Sequence[Any] | None, adapter: str) -> str:
    """The salt of the request, which is among the extra keys of its first block. With images there, no request's."""
    others = [key for key in extra_keys or () if key != adapter]
    return others[0] if len(others) == 1 and isinstance(others[0], str) else repr(others) if others else ""


def _is_image(extra_keys: Sequence[Any] | None, event: Mapping[str, Any]) -> bool:
    return any(key != event.get("lora_name") for key in extra_keys or ())
