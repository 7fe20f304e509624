"""TensorRT-LLM's KV events in a compact form. Pure; runs in the thread that fetches them, because the event of a long
prompt holds a dictionary per token."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvloom_common.text.block_hash import token_bytes

BlockIdentity = int | str
"""TensorRT-LLM's block_hash: a number, or hexadecimal text. Its rule differs between versions, so it only distinguishes
blocks. Groups of layers (`layer_group_id`) have events of their own with the same identities."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredBlock:
    identity: BlockIdentity
    num_tokens: int
    token_bytes: bytes | None
    """The bytes of the tokens that kvloom_common.text.block_hash takes; None if the tokens alone do not identify the
    content (images, prompt tuning)."""
    cache_salt: str | None = None
    """Only newer versions report it."""


@dataclasses.dataclass(frozen=True, slots=True)
class KvRecord:
    """One event. The fields that its `kind` does not have are empty."""

    event_id: int
    rank: int
    """Attention data-parallel rank; each has a cache and a numbering of its own."""
    window_size: int | None
    kind: str
    parent: BlockIdentity | None = None
    blocks: Sequence[StoredBlock] = ()
    identities: Sequence[BlockIdentity] = ()
    """The identities of removed or updated blocks."""


def as_records(batch: Any) -> list[Mapping[str, Any]]:
    """The result of a getter as dictionaries. Versions return dictionaries, JSON texts, or lists of either."""
    if batch is None:
        return []
    if isinstance(batch, (str, bytes)):
        batch = json.loads(batch)
    if isinstance(batch, Mapping):
        return [batch]
    if not isinstance(batch, Iterable):
        return []
    return [record for item in batch for record in as_records(item)]


def parse_events(batch: Any) -> list[KvRecord]:
    """Raises ValueError, KeyError or TypeError for anything that is not an event."""
    return [_parse(event) for event in as_records(batch)]


def _parse(event: Mapping[str, Any]) -> KvRecord:
    data = event["data"]
    kind = data["type"]
    parent = None
    blocks: Sequence[StoredBlock] = ()
    identities: Sequence[BlockIdentity] = ()
    if kind == "stored":
        parent = data.get("parent_hash")
        blocks = [_parse_block(block) for block in data["blocks"]]
    elif kind == "removed":
        identities = data["block_hashes"]
    elif kind == "updated":
        identities = [data["block_hash"]]
    rank = event.get("attention_dp_rank") or 0
    return KvRecord(event["event_id"], rank, event.get("window_size"), kind, parent, blocks, identities)


def _parse_block(block: Mapping[str, Any]) -> StoredBlock:
    tokens = block["tokens"]
    content = None
    if not block.get("mm_keys"):
        token_ids = [token["token_id"] for token in tokens if not token.get("token_extra_id")]
        if len(token_ids) == len(tokens) and all(isinstance(token_id, int) for token_id in token_ids):
            content = token_bytes(token_ids)
    return StoredBlock(block["block_hash"], len(tokens), content, block.get("cache_salt"))
