"""Identifies what all shards of a model compute with: only while it stays the same can an answer be reused, or computed
again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from router.core.events import ShardDescription


class ModelFingerprint(msgspec.Struct, frozen=True):
    """The same for all shards of a model."""

    model: str
    version: str
    checksum: str
    card_checksum: str
    variant: str
    """See ShardInfo.variant in shard_service.proto; never ""."""
    max_model_len: int
    incarnations: tuple[str, ...] = ()
    """The shards' incarnations, if their files have no checksum: then nothing says that another process has the same
    ones."""


NO_FINGERPRINTS: Final[Mapping[str, ModelFingerprint]] = {}


def fingerprints(shards: Iterable[ShardDescription]) -> Mapping[str, ModelFingerprint]:
    """By model; without those whose shards differ, or promise no bits."""
    by_model: dict[str, list[ShardDescription]] = {}
    for shard in shards:
        by_model.setdefault(shard.model, []).append(shard)
    found: dict[str, ModelFingerprint] = {}
    for model, own in by_model.items():
        first, *others = {fingerprint_of(shard) for shard in own}
        if others or not first.variant:
            continue
        if not first.checksum:
            incarnations = tuple(sorted(shard.incarnation_id for shard in own))
            first = msgspec.structs.replace(first, incarnations=incarnations)
        found[model] = first
    return found


def fingerprint_of(shard: ShardDescription) -> ModelFingerprint:
    """That of one shard."""
    return ModelFingerprint(
        shard.model,
        shard.model_version,
        shard.model_checksum,
        shard.card_checksum,
        shard.variant,
        shard.max_model_len,
    )
