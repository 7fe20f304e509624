"""Planted bugs in following the registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvloom_common.discovery.records import ShardRecord
from lab.dst.checkers import RecordsFollowed, ShardsFound
from lab.dst.nodes import fleet_reader
from lab.dst.nodes import registry as sim_registry
from router.links.fleet_links import LinkChanges, LinkTarget, follow_registry
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(RecordsFollowed)
def talks_to_any_incarnation(patch: Patch) -> None:
    """The process that answers at a shard's address is taken for it, although it is another incarnation."""
    original = LinkTarget.refusal

    def refusal(self: LinkTarget, shard_id: str, incarnation_id: str) -> str:
        return original(self, shard_id, self.expected_incarnation_id)

    patch.setattr(LinkTarget, "refusal", refusal)


@caught_by(RecordsFollowed)
def drops_connected_shards_without_a_record(patch: Patch) -> None:
    """A connection ends when the record of its shard is gone, as if the registry were the truth."""

    def follow(records: Mapping[str, ShardRecord], links: Mapping[str, Any]) -> LinkChanges:
        changes = follow_registry(records, links)
        return LinkChanges([shard_id for shard_id in links if shard_id not in records] + changes.ended, changes.started)

    patch.setattr(fleet_reader, "follow_registry", follow)


@caught_by(ShardsFound)
def keeps_links_to_dead_incarnations(patch: Patch) -> None:
    """A link is not replaced when the record names another incarnation, which it then refuses for good."""
    original = follow_registry

    def follow(records: Mapping[str, ShardRecord], links: Mapping[str, Any]) -> LinkChanges:
        same = {
            key: msgspec.structs.replace(record, incarnation_id=links[key].target.record.incarnation_id)
            if key in links
            else record
            for key, record in records.items()
        }
        return original(same, links)

    patch.setattr(fleet_reader, "follow_registry", follow)


@caught_by(ShardsFound)
def follows_nothing_beside_garbage(patch: Patch) -> None:
    """One value that is no record makes the whole registry count as empty."""
    original = sim_registry.SimRegistry.list_shards

    def list_shards(self: Any) -> dict[str, ShardRecord] | None:
        found = original(self)
        num_values = sum(self._value(key) is not None for key in self.values)
        return {} if found is not None and len(found) < num_values else found

    patch.setattr(sim_registry.SimRegistry, "list_shards", list_shards)
