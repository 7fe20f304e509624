"""What must be true once nothing is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.core.events import ChoiceSpec, Request
from router.core.placement import PlacementPlan
from tools.dst.checkers.base import Checker
from tools.dst.nodes.block_cache import hashes_of

if TYPE_CHECKING:
    from tools.dst.nodes.router_node import RouterNode
    from tools.dst.world import World

MAX_PROMPTS = 60
"""Asked about at the end, the newest."""


def plan_of(node: RouterNode, model: str, tenant: str, prompt: tuple[int, ...]) -> PlacementPlan:
    request = Request("question", "nobody", model, prompt, "", [ChoiceSpec(1, 0)], max_tokens=1, tenant=tenant)
    return node.core.plan(request, node.now)


class IndexExact(Checker):
    """Every router knows of every shard exactly what it has cached, whatever was lost on the way: asked through
    placement, for every prompt there was."""

    invariant = "index_exact"

    def at_rest(self, world: World) -> None:
        shards = {shard.shard_id: shard for shard in world.shards}
        for model, tenant, prompt in list(world.traffic.prompts)[-MAX_PROMPTS:]:
            for node in world.nodes:
                for score in plan_of(node, model, tenant, prompt).shards:
                    shard = shards[score.shard_id]
                    if score.filtered_reason:
                        continue
                    block_size = shard.shape.block_size
                    hashes = hashes_of(model, tenant, prompt, block_size)
                    held = min(shard.cache.count_overlap(hashes) * block_size, len(prompt) - 1)
                    if score.num_overlap_tokens != held:
                        self.fail(
                            f"{node.name} counts on {score.num_overlap_tokens} tokens of a prompt at {shard.shard_id}, "
                            f"which holds {held}"
                        )


class LoadTrue(Checker):
    """With nothing to do anywhere, no shard looks busy to any router."""

    invariant = "load_true"

    def at_rest(self, world: World) -> None:
        for model in {shard.shape.model for shard in world.shards}:
            for node in world.nodes:
                for score in plan_of(node, model, "tenant-0", (1,)).shards:
                    load = (score.num_running, score.num_waiting, score.num_queued_prefill_tokens)
                    if not score.filtered_reason and any(load):
                        self.fail(f"{score.shard_id} is idle; {node.name} counts on running, waiting, prefill {load}")
