"""Checks how tenants share the shards: who may be preempted, and for whom; and guaranteed shares of cached blocks."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lab.dst.checker import Checker
from lab.dst.nodes.block_cache import prompt_hashes
from lab.dst.observed import ObservedChoice, ObservedRequest, ObservedShard, State
from lab.dst.views import ShardView, SimulatedRouterView
from router.core.actions import Action, SequencesPreempted, SubmitAttempt
from router.core.events import Event, KvChange, Request, RequestArrived
from router.core.rule_settings import FairnessSettings


class PreemptionsJustified(Checker):
    """Sequences are preempted only while a request of another tenant has waited long enough, only those of a tenant
    that has more on the shard than the one that waits, and never so many that it falls below its share. Or else while
    tenants compete for blocks of which fewer than the reserve are free, and then only those of a tenant with more than
    its share of them."""

    invariant = "preemptions_justified"

    def on_preemption(self, node: SimulatedRouterView, preempted: SequencesPreempted) -> None:
        fairness, shard = node.config.fairness, node.witness.shards.get(preempted.shard_id)
        if node.config.classes:
            return  # they may give way to a more urgent class of their own tenant
        if fairness is None or shard is None:
            self.fail(f"sequences of {preempted.tenant} were preempted on {preempted.shard_id}, which may not be")
        choices = [shard.open.get(slot) for slot in preempted.slots]
        if any(choice is None or choice.request.request.tenant != preempted.tenant for choice in choices):
            self.fail(f"slots {list(preempted.slots)} of {preempted.shard_id} are not all {preempted.tenant}'s")
        if self._restores_reserve(node, shard, preempted, [choice for choice in choices if choice], fairness):
            return
        counts = _running(shard)
        # Prefill chunks may be of further tenants.
        num_tenants = len({choice and choice.request.request.tenant for choice in shard.open.values()})
        num_tenants += sum(choice is None for choice in shard.open.values())
        num_left = counts.get(preempted.tenant, 0)
        if num_left < shard.num_places // max(2, num_tenants + 1):
            self.fail(f"{num_left} sequences of {preempted.tenant} are left on {preempted.shard_id}, below its share")
        waiting = self._waiting(node, shard, node.now - fairness.preempt_after_seconds)
        waiting.discard(preempted.tenant)
        if not any(counts.get(tenant, 0) < num_left + len(preempted.slots) for tenant in waiting):
            self.fail(f"sequences of {preempted.tenant} were preempted on {preempted.shard_id}, and no other needed it")

    def _restores_reserve(
        self,
        node: SimulatedRouterView,
        shard: ObservedShard,
        preempted: SequencesPreempted,
        chosen: list[ObservedChoice],
        fairness: FairnessSettings,
    ) -> bool:
        """True when blocks are short, and the tenant has more than its share without all but one of those chosen."""
        tenants = {choice.request.request.tenant if choice else None for choice in shard.open.values()}
        is_contended = len(tenants) > 1 or shard.description.model in node.witness.contended
        if not is_contended or shard.num_free_blocks_at_least() >= shard.num_reserved_blocks(fairness):
            return False
        share = shard.num_blocks_to_divide_at_least() // max(2, len(shard.open) if None in tenants else len(tenants))
        # Those chosen were cancelled just before, so that they are not counted among what is held.
        num_left = shard.num_held_blocks_at_most(preempted.tenant)
        return num_left + max(shard.num_blocks(choice) for choice in chosen) > share

    def _waiting(self, node: SimulatedRouterView, shard: ObservedShard, before: float) -> set[str]:
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


class ReserveKept(Checker):
    """While tenants compete, no sequence of a tenant above its share of a shard's blocks is sent there into the blocks
    that are left to the others."""

    invariant = "reserve_kept"

    def __init__(self) -> None:
        self._suspects: list[tuple[str, ObservedShard, str, int]] = []
        """(request, shard, tenant, the most blocks that the tenant may have held) of what was sent in this event."""

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        fairness, shard = node.config.fairness, node.witness.shards.get(attempt.shard_id)
        if fairness is None or shard is None or observed is None or node.now >= shard.contended_until:
            return
        tenant = observed.request.tenant
        num_output_tokens = max(len(spec.output_token_ids) for spec in attempt.choices)
        num_tokens = len(observed.request.prompt_token_ids) + num_output_tokens
        num_needed = -(-num_tokens // shard.description.block_size) + len(attempt.choices) - 1
        if shard.load.num_available_blocks - num_needed >= shard.num_reserved_blocks(fairness):
            return
        tenants = {choice.request.request.tenant for choice in shard.open.values() if choice is not None} | {tenant}
        share = shard.description.num_blocks // max(2, len(tenants))
        num_held = shard.num_held_blocks_at_least(tenant)
        if num_held and num_held + num_needed > share:
            self._suspects.append((observed.request.request_id, shard, tenant, share - num_needed))

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        # The cancel of a choice that left first, because it was halted, comes after what was sent.
        for request_id, shard, tenant, max_held in self._suspects:
            num_held = shard.num_held_blocks_at_least(tenant)
            if num_held and num_held > max_held:
                self.fail(f"{request_id} of {tenant} was sent into the reserve of {shard.description.shard_id}")
        self._suspects.clear()


def _running(shard: ObservedShard) -> dict[str, int]:
    counts: dict[str, int] = {}
    for choice in shard.open.values():
        if choice is not None and choice.state is State.RUNNING:
            tenant = choice.request.request.tenant
            counts[tenant] = counts.get(tenant, 0) + 1
    return counts


class KvSharesKept(Checker):
    """Whatever others store, a tenant with a share still has what it had, or at least its share."""

    invariant = "kv_shares_kept"

    def __init__(self) -> None:
        self._percents: dict[str, int] = {}
        """By salt, which stands for the tenant: as clients' requests say, whatever routers make of it."""
        self._salts: dict[int, str] = {}
        """By block."""

    def before_event(self, node: SimulatedRouterView, event: Event) -> None:
        if isinstance(event, RequestArrived) and event.request.kv_share is not None:
            self._percents[event.request.cache_salt] = event.request.kv_share.percent

    def on_stored(self, shard: ShardView, request: Request, changes: Sequence[KvChange]) -> None:
        salt = request.cache_salt
        for block_hash in prompt_hashes(request, shard.shape.block_size):
            self._salts[block_hash] = salt
        removed = Counter(self._salts.get(block, "") for change in changes for block in change.removed)
        for tenant in removed.keys() & self._percents.keys() - {salt}:
            num_left = sum(self._salts.get(block) == tenant for block in shard.cache.blocks)
            num_guaranteed = shard.shape.num_blocks * self._percents[tenant] // 100
            if num_left < min(num_guaranteed, num_left + removed[tenant]):
                self.fail(
                    f"{shard.shard_id} evicted {removed[tenant]} blocks of {tenant} for {request.request_id}: "
                    f"{num_left} are left, and {num_guaranteed} guaranteed"
                )
