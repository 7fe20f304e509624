"""Finds the shards that may take a request: by what they serve, have room for, and must leave to other tenants."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from router.core.fleet.fleet import Fleet, Shard
from router.core.live import LiveRequest
from router.core.placement.plan import ShardPlan


class Eligibility:
    """The shards of a fleet that could run a request, with or without room for it now."""

    def __init__(
        self, fleet: Fleet, must_leave_room: Callable[[Shard, LiveRequest], bool], may_leave_room: Callable[[str], bool]
    ) -> None:
        """`must_leave_room` says whether a request may not be sent to a shard although it has room, and
        `may_leave_room` whether that can be so for any shard of a model."""
        self._fleet = fleet
        self._must_leave_room = must_leave_room
        self._may_leave_room = may_leave_room

    def has_room(self, shard: Shard, live: LiveRequest) -> bool:
        """True when the shard has room for the request's tenant."""
        return shard.has_room and not self._must_leave_room(shard, live)

    def block_sizes(self, shards: Sequence[Shard]) -> Collection[int]:
        """The sizes of the shards' KV blocks. Nearly always the whole fleet has one, and no shard is looked at."""
        sizes = self._fleet.block_sizes
        return sizes if len(sizes) == 1 else {shard.description.block_size for shard in shards}

    def any_has_room(self, live: LiveRequest) -> bool:
        """True when some ready shard has room for the request's tenant, if the request fits there or not."""
        return any(self.has_room(shard, live) for shard in self._fleet.ready(live.request.model))

    def fits(self, live: LiveRequest, shard: Shard) -> bool:
        """True when that ready shard could run the request."""
        if self._fleet.has_prefill_shards and not self._may_answer(live, shard):
            return False
        is_wide = shard.description.max_model_len >= live.min_window
        if not (shard.can_generate if live.request.pooling is None else shard.can_embed):
            return False
        adapter = live.request.adapter
        if adapter is not None and not shard.adapters.has(adapter):
            return False
        return is_wide and shard.shard_id != live.avoid_shard_id and not shard.is_suspected

    def eligible(self, live: LiveRequest) -> list[Shard]:
        """Ready shards that could run the request, with or without room: without suspected ones, and without the one
        where it just failed, if there is another."""
        window = live.min_window
        request = live.request
        known = self._fleet.ready_shards(request.model)
        if (
            window <= known.least_window
            and known.can_generate
            and request.pooling is None
            and request.adapter is None
            and not self._fleet.has_prefill_shards
        ):  # nearly always all of them could
            shards = known.preferred
            if live.avoid_shard_id and len(shards) > 1:
                return [shard for shard in shards if shard.shard_id != live.avoid_shard_id]
            return shards
        ready = known.shards
        if live.request.pooling is None:
            shards = [s for s in ready if s.description.max_model_len >= window and s.can_generate]
        else:
            shards = [s for s in ready if s.description.max_model_len >= window and s.can_embed]
        adapter = live.request.adapter
        if adapter is not None:
            shards = [shard for shard in shards if shard.adapters.has(adapter)]
        if self._fleet.has_prefill_shards:
            shards = [shard for shard in shards if not shard.is_for_prompts] or shards
            shards = [shard for shard in shards if self._may_answer(live, shard)] or shards
        if len(shards) > 1:
            shards = [shard for shard in shards if not shard.is_suspected] or shards
        if live.avoid_shard_id and len(shards) > 1:
            return [shard for shard in shards if shard.shard_id != live.avoid_shard_id]
        return shards

    def _may_answer(self, live: LiveRequest, shard: Shard) -> bool:
        """True when the shard is not for prompts only, and can use the request's hand-off if it has one."""
        return not shard.is_for_prompts and (not live.handoff or self.can_fetch(live, shard))

    @staticmethod
    def can_fetch(live: LiveRequest, shard: Shard) -> bool:
        """True when the shard can use the request's hand-off."""
        split = live.split
        return split is not None and split.prefill_shard is not None and shard.can_fetch_from(split.prefill_shard)

    def can_run(self, live: LiveRequest) -> bool:
        """True when a shard that could run the request has room."""
        model = live.request.model
        for shard in self._fleet.shards.values():  # nearly always the first shard
            if (
                self.has_room(shard, live)
                and not shard.is_draining
                and shard.description.model == model
                and self.fits(live, shard)
            ):
                return True
        return any(self.has_room(shard, live) for shard in self.eligible(live))

    def open_shards(self, live: LiveRequest) -> list[Shard]:
        """The shards that could run the request and have room. An answer continues on a shard of the same variant if
        there is one: only then are its tokens those of an uninterrupted one. (For a first attempt the variant does not
        matter, as no KV moves between shards.)"""
        shards = self.eligible(live)
        if self._fleet.full:
            shards = [shard for shard in shards if shard not in self._fleet.full]
        if self._may_leave_room(live.request.model):
            shards = [shard for shard in shards if not self._must_leave_room(shard, live)]
        if live.variant and live.continues_answer:
            return [shard for shard in shards if shard.description.variant == live.variant] or shards
        return shards

    def filtered(self, live: LiveRequest, open_shards: Sequence[Shard]) -> list[ShardPlan]:
        """The reasons why all other shards could not take it."""
        open_ids = {shard.shard_id for shard in open_shards}
        return [
            ShardPlan(shard.shard_id, filtered_reason=self.reason_against(shard, live))
            for shard in self._fleet.shards.values()
            if shard.shard_id not in open_ids
        ]

    def reason_against(self, shard: Shard, live: LiveRequest) -> str:
        if shard.description.model != live.request.model:
            return f"serves {shard.description.model}"
        if shard.is_draining:
            return "draining"
        if shard.description.max_model_len < live.min_window:
            return f"window of {shard.description.max_model_len} tokens, {live.min_window} needed"
        if live.request.pooling is not None and not shard.can_embed:
            return "gives no embeddings"
        if live.request.pooling is None and not shard.can_generate:
            return "gives embeddings only"
        adapter = live.request.adapter
        if adapter is not None and not shard.adapters.has(adapter):
            return f"has no adapter {adapter.name} with the checksum {adapter.checksum[:12]}"
        if shard.is_for_prompts:
            return "computes prompts for other shards"
        if live.handoff and not self.can_fetch(live, shard):
            return "cannot fetch the prompt's KV from the shard that has computed it"
        if shard.health is not None and shard.is_suspected:
            return f"suspected: {shard.health.symptom}"
        if not shard.has_room:
            return "full"
        if self._must_leave_room(shard, live):
            return "the rest is left to other tenants"
        return "failed this request before"
