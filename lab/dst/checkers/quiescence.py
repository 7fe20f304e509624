"""Checks the core's own consistency, and the state of the routers when nothing is in flight."""

from __future__ import annotations

from kvloom.adapters import Adapter
from lab.dst.checker import Checker
from lab.dst.nodes.block_cache import hashes_of
from lab.dst.views import SimulatedRouterView, WorldView
from router.core.events import ChoiceSpec, Request
from router.core.placement import PlacementPlan

MAX_PROMPTS = 60
"""How many of the newest prompts are checked."""


def plan_of(
    node: SimulatedRouterView, model: str, tenant: str, prompt: tuple[int, ...], adapter: Adapter | None = None
) -> PlacementPlan:
    choices = [ChoiceSpec(1, 0)]
    request = Request(
        "question", "nobody", model, prompt, "", choices, 1, tenant=tenant, cache_salt=tenant, adapter=adapter
    )
    return node.core.plan(request, node.now)


class IndexExact(Checker):
    """Every router knows exactly which blocks every shard has cached, whatever was lost in transit. The placement of
    recent prompts shows it."""

    invariant = "index_exact"

    def on_quiescence(self, world: WorldView) -> None:
        shards = {shard.shard_id: shard for shard in world.shards}
        for model, tenant, prompt, adapter in list(world.traffic.prompts)[-MAX_PROMPTS:]:
            for node in world.nodes:
                for score in plan_of(node, model, tenant, prompt, adapter).shards:
                    shard = shards[score.shard_id]
                    if score.filtered_reason:
                        continue
                    block_size = shard.shape.block_size
                    hashes = hashes_of(model, tenant, prompt, adapter, block_size)
                    held = min(shard.cache.count_overlap(hashes) * block_size, len(prompt) - 1)
                    if score.num_overlap_tokens != held:
                        self.fail(
                            f"{node.name} expects {score.num_overlap_tokens} cached tokens at {shard.shard_id}, "
                            f"which holds {held}"
                        )


class LoadExact(Checker):
    """When all shards are idle, every router estimates their load as zero."""

    invariant = "load_exact"

    def on_quiescence(self, world: WorldView) -> None:
        for model in {shard.shape.model for shard in world.shards}:
            for node in world.nodes:
                for score in plan_of(node, model, "tenant-0", (1,)).shards:
                    load = (score.num_running, score.num_waiting, score.num_queued_prefill_tokens)
                    if not score.filtered_reason and any(load):
                        self.fail(f"{score.shard_id} is idle; {node.name} estimates running, waiting, prefill {load}")


class Integrity(Checker):
    """The assertions of `RouterCore.check_integrity` hold: a reservation is released exactly once, no load estimate is
    negative, and every index of slots and requests is consistent.

    They scan the whole state and cost more than all the rest, so they run only after every third message. The time is
    better spent on more seeds."""

    invariant = "integrity"

    def __init__(self) -> None:
        self._num_messages = 0

    def integrity(self, node: SimulatedRouterView) -> None:
        self._num_messages += 1
        if self._num_messages % 3 == 0:
            self._check(node)

    def on_quiescence(self, world: WorldView) -> None:
        for node in world.nodes:
            self._check(node)

    def _check(self, node: SimulatedRouterView) -> None:
        try:
            node.core.check_integrity()
        except AssertionError as error:
            traceback = error.__traceback__
            while traceback is not None and traceback.tb_next is not None:
                traceback = traceback.tb_next
            place = "" if traceback is None else f" ({traceback.tb_frame.f_code.co_name}:{traceback.tb_lineno})"
            self.fail(f"{error or 'an assertion of check_integrity'}{place}")
