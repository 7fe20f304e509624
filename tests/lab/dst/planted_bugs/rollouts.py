"""Planted bugs in rollouts of new versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import xxhash

from kvloom_common.config import RouteTarget
from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.models import model_routes
from kvloom_common.models.rollout_follower import RolloutFollower
from lab.dst.checkers import (
    RolloutsEnd,
    RolloutsHarmless,
    SessionsMoveOnce,
    SharesConverge,
    VersionsKept,
)
from lab.dst.rollouts import edge
from lab.dst.rollouts.versions import SimVersions
from router.core.fleet.fleet import Fleet, Shard
from tests.lab.dst.planted_bugs.registry import Patch, caught_by
from tools.supervisor.models.idle_watch import IdleWatch
from tools.supervisor.rollout.announcement import RolloutAnnouncement


@caught_by(VersionsKept, first_seed=9)
def takes_one_version_for_another(patch: Patch) -> None:
    """A router counts the shards of all versions as those of the model."""

    def find_ready(self: Fleet, model: str) -> list[Shard]:
        name = model.partition("@")[0]
        shards = [shard for shard in self.shards.values() if not shard.is_draining]
        return [shard for shard in shards if shard.description.model.partition("@")[0] == name]

    patch.setattr(Fleet, "_find_ready", find_ready)


@caught_by(SessionsMoveOnce, first_seed=9)
def draws_a_version_for_each_request(patch: Patch) -> None:
    """The hash that decides is that of the request, not of its session: a conversation changes between versions."""
    patch.setattr(edge, "share_key", lambda request: request.request_id)


@caught_by(SessionsMoveOnce, first_seed=9)
def draws_anew_with_every_step(patch: Patch) -> None:
    """The hash depends on the share, so that sessions come back from the new version when it grows."""

    def drawn(route: str, targets: Sequence[RouteTarget], key: str) -> str:
        position = xxhash.xxh3_64_intdigest(f"{route}{targets[-1].weight}{key}".encode()) / 2**64
        return targets[0].model if len(targets) == 1 or position < targets[0].weight else targets[-1].model

    patch.setattr(model_routes, "_drawn", drawn)


@caught_by(SharesConverge, first_seed=9)
def gives_too_small_a_share(patch: Patch) -> None:
    """A share is squared on its way."""
    original = model_routes._shares_of

    def shares_of(rollout: RolloutRecord) -> Any:
        return original(msgspec.structs.replace(rollout, share=rollout.share**2))

    patch.setattr(model_routes, "_shares_of", shares_of)


@caught_by(SharesConverge, first_seed=9)
def keeps_the_first_share(patch: Patch) -> None:
    """An edge that follows a rollout already does not look at its record again."""
    original = RolloutFollower._follow

    def follow(self: RolloutFollower, rollouts: Mapping[str, RolloutRecord]) -> None:
        original(self, {name: self._rollouts.get(name, record) for name, record in rollouts.items()})

    patch.setattr(RolloutFollower, "_follow", follow)


@caught_by(RolloutsHarmless, first_seed=9)
def unloads_without_waiting(patch: Patch) -> None:
    """The shards of the version that goes are stopped while answers run there."""

    async def drained(_self: SimVersions, _shard: Any) -> None:
        pass

    patch.setattr(IdleWatch, "is_over", property(lambda _self: True))
    patch.setattr(SimVersions, "_drained", drained)


@caught_by(RolloutsEnd, first_seed=9)
def leaves_the_new_version_loaded(patch: Patch) -> None:
    """A rollback gives the sessions back and forgets to unload."""

    async def unload_new(_self: SimVersions, _on_step: Any) -> None:
        pass

    patch.setattr(SimVersions, "unload_new", unload_new)


@caught_by(RolloutsEnd, first_seed=9)
def announces_a_rollout_for_ever(patch: Patch) -> None:
    """The record is renewed although the rollout has ended."""

    async def end(_self: RolloutAnnouncement, *, at_once: bool) -> None:
        pass

    patch.setattr(RolloutAnnouncement, "end", end)
