"""Tenants share the shards: who may be preempted, and for whom."""

from __future__ import annotations

from router.core.actions import SequencesPreempted
from tools.dst.checker import Checker
from tools.dst.observed import ObservedShard, State
from tools.dst.views import RouterView


class PreemptionsJustified(Checker):
    """Sequences are preempted only while a request of another tenant has waited long enough, only those of a tenant
    that has more on the shard than the one that waits, and never so many that it falls below its share."""

    invariant = "preemptions_justified"

    def on_preemption(self, node: RouterView, preempted: SequencesPreempted) -> None:
        fairness, shard = node.config.fairness, node.witness.shards.get(preempted.shard_id)
        if fairness is None or shard is None:
            self.fail(f"sequences of {preempted.tenant} were preempted on {preempted.shard_id}, which may not be")
        choices = [shard.open.get(slot) for slot in preempted.slots]
        if any(choice is None or choice.request.request.tenant != preempted.tenant for choice in choices):
            self.fail(f"slots {list(preempted.slots)} of {preempted.shard_id} are not all {preempted.tenant}'s")
        counts = _running(shard)
        # Prefill chunks may be of further tenants.
        num_tenants = len({choice and choice.request.request.tenant for choice in shard.open.values()})
        num_tenants += sum(choice is None for choice in shard.open.values())
        num_left = counts.get(preempted.tenant, 0)
        if num_left < shard.description.max_batch // max(2, num_tenants + 1):
            self.fail(f"{num_left} sequences of {preempted.tenant} are left on {preempted.shard_id}, below its share")
        waiting = self._waiting(node, shard, node.now - fairness.preempt_after_seconds)
        waiting.discard(preempted.tenant)
        if not any(counts.get(tenant, 0) < num_left + len(preempted.slots) for tenant in waiting):
            self.fail(f"sequences of {preempted.tenant} were preempted on {preempted.shard_id}, and no other needed it")

    def _waiting(self, node: RouterView, shard: ObservedShard, before: float) -> set[str]:
        """Tenants with a request that has waited since `before`, in the router or on the shard."""
        latest = before + 1e-9
        queued = {
            observed.request.tenant
            for observed in node.witness.live.values()
            if observed.request.model == shard.description.model
            and observed.arrived_at <= latest
            and any(choice.state is State.WAITING for choice in observed.choices)
        }
        sent = {
            choice.request.request.tenant
            for choice in shard.open.values()
            if choice is not None and choice.state is State.RUNNING and choice.placed_at <= latest
        }
        return queued | sent


def _running(shard: ObservedShard) -> dict[str, int]:
    counts: dict[str, int] = {}
    for choice in shard.open.values():
        if choice is not None and choice.state is State.RUNNING:
            tenant = choice.request.request.tenant
            counts[tenant] = counts.get(tenant, 0) + 1
    return counts
