"""Prompts that one shard computes for the answer of another: the legs, and their hand-offs."""
# ruff: noqa: ARG002  (a hook has the same arguments for all checkers)

from __future__ import annotations

from collections.abc import Sequence

from lab.dst.checker import Checker
from lab.dst.observed import ObservedHandoff, ObservedRequest, ObservedShard
from lab.dst.views import ShardView, SimulatedRouterView
from router.core.actions import Action, RequestEnded, SubmitAttempt
from router.core.dispatch.prefill_handoffs import MAX_LEGS
from router.core.events import Event, Request, Tick


class LegsFit(Checker):
    """A leg is the whole prompt of a request that waits for its first attempt, on a shard that computes prompts and has
    room. A request has at most one at a time. It ends with its request and when it takes too long."""

    invariant = "legs_fit"

    def on_prefill_leg(self, node: SimulatedRouterView, observed: ObservedRequest | None, leg: SubmitAttempt) -> None:
        name, prompt, shard = leg.request.request_id, list(leg.request.prompt_token_ids), self._shard(node, leg)
        settings = node.config.disaggregation
        if observed is None or observed.num_attempts or observed.handoff is not None:
            self.fail(f"{name} is computed for a request that does not wait for its first attempt")
        if observed.leg is not None or observed.prefill_chunk is not None or not observed.is_waiting:
            self.fail(f"{name} is computed while {observed.leg or observed.prefill_chunk} is, or its request ends")
        if observed.num_legs >= MAX_LEGS or len(observed.choices) != 1 or observed.is_continued:
            self.fail(f"{name} is leg {observed.num_legs + 1} of {len(observed.choices)} choices")
        if prompt != list(observed.request.prompt_token_ids) or leg.request.tenant != observed.request.tenant:
            self.fail(f"{name} is not the prompt of its request")
        if len(prompt) < settings.min_prompt_tokens or not node.config.handoffs.can_hand_over(
            observed.request.sampling
        ):
            self.fail(f"{name} should be computed where its answer is")
        if not shard.can_take(observed) or not shard.has_room or shard.is_suspected or not shard.computes_prompts:
            self.fail(f"{name} was dispatched to {leg.shard_id}, which cannot take it now")
        shards = [other for other in node.witness.shards.values() if not other.is_draining]
        if not any(other.can_fetch_from(shard.description) for other in shards):
            self.fail(f"{name} was dispatched to {leg.shard_id}, whose KV no other shard could fetch")

    def _shard(self, node: SimulatedRouterView, leg: SubmitAttempt) -> ObservedShard:
        shard = node.witness.shards.get(leg.shard_id)
        if shard is None:
            self.fail(f"{leg.request.request_id} was dispatched to {leg.shard_id}, which is not there")
        return shard

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        if not isinstance(event, Tick):
            return
        max_seconds = node.config.disaggregation.leg_timeout_seconds
        for observed in node.witness.live.values():
            if observed.leg is not None and node.now - observed.leg.began_at > max_seconds:
                self.fail(f"{observed.request.request_id} waits for {observed.leg}, which takes too long")

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        if observed is not None and not observed.is_duplicate and observed.leg is not None:
            self.fail(f"{end.request_id} has ended, and {observed.leg} computes its prompt")


class HandoffsKept(Checker):
    """A hand-off is used at most once, by the request for whose prompt it was made, on a shard that can fetch its KV,
    while the shard that has computed it is there."""

    invariant = "handoffs_kept"

    def __init__(self) -> None:
        self._made: dict[bytes, Request] = {}
        """By hand-off that no shard has got: the request of its leg."""

    def on_handoff(self, shard: ShardView, request: Request, handoff: bytes) -> None:
        self._made[handoff] = request

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if not attempt.handoff:
            return
        name, own = attempt.request.request_id, None if observed is None else observed.handoff
        if own is None or own.handoff != attempt.handoff:
            self.fail(f"{name} was dispatched with {attempt.handoff!r}, it has {own}")
        prefill, shard = node.witness.shards.get(own.shard.shard_id), node.witness.shards[attempt.shard_id]
        if prefill is None or prefill.description.incarnation_id != own.shard.incarnation_id:
            self.fail(f"{name} was dispatched with {attempt.handoff!r}, whose shard is gone")
        if not shard.can_fetch_from(own.shard):
            self.fail(
                f"{name} was dispatched with {attempt.handoff!r} to {attempt.shard_id}, which cannot fetch its KV"
            )

    def on_collection(self, node: SimulatedRouterView, collection: SubmitAttempt) -> None:
        for observed in node.witness.live.values():
            own = observed.handoff
            if own is not None and own.handoff == collection.handoff and not observed.is_ending:
                self.fail(f"{own} is collected, for which {observed.request.request_id} waits")

    def on_fetch(self, shard: ShardView, attempt: SubmitAttempt) -> None:
        request, made = attempt.request, self._made.pop(attempt.handoff, None)
        if made is None:
            self.fail(f"{request.request_id} came with {attempt.handoff!r}, which was used before or never made")
        if _prompt(made) != _prompt(request) or attempt.choices[0].output_token_ids:
            self.fail(f"{request.request_id} came with {attempt.handoff!r}, which is for {made.request_id}")


class HandoffsCollected(Checker):
    """KV stays on the shard that has computed it only for an answer: a router that has a hand-off which no answer needs
    sends it to a shard that fetches the KV in the same event, if there is one. It may be needed no more because its
    request has ended, or has given its leg up. Whether the KV of an attempt whose shard was lost has been fetched is
    not known: that is left to a timeout."""

    invariant = "handoffs_collected"

    def __init__(self) -> None:
        self._legs: dict[bytes, Request] = {}
        self._kept: dict[SimulatedRouterView, list[ObservedHandoff]] = {}
        """By router: the hand-offs that its live requests have."""
        self._sent: set[bytes] = set()
        """Those that are sent to shards in the current event, or given up by an attempt that goes without."""

    def on_handoff(self, shard: ShardView, request: Request, handoff: bytes) -> None:
        self._legs[handoff] = request

    def before_event(self, node: SimulatedRouterView, event: Event) -> None:
        self._sent.clear()

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        if observed is not None and observed.handoff is not None:
            self._sent.add(observed.handoff.handoff)

    def on_collection(self, node: SimulatedRouterView, collection: SubmitAttempt) -> None:
        self._sent.add(collection.handoff)

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        kept = self._kept.pop(node, [])
        if node.witness.handed_over:
            kept = [*kept, *node.witness.handed_over]
        kept = [one for one in kept if one.handoff not in self._sent]
        if not kept:
            return
        needed = {observed.handoff.handoff for observed in node.witness.live.values() if observed.handoff is not None}
        self._kept[node] = [one for one in kept if one.handoff in needed]
        for one in kept:
            if one.handoff not in needed and self._can_be_collected(node, one):
                self.fail(f"no answer needs {one}, and no shard is asked to fetch its KV")

    def _can_be_collected(self, node: SimulatedRouterView, one: ObservedHandoff) -> bool:
        leg, prefill = self._legs[one.handoff], node.witness.shards.get(one.shard.shard_id)
        if prefill is None or prefill.description.incarnation_id != one.shard.incarnation_id:
            return False
        return any(
            shard.can_fetch_from(one.shard)
            and not shard.is_draining
            and not shard.is_suspected
            and shard.description.max_model_len > len(leg.prompt_token_ids)
            and (leg.adapter is None or shard.adapters.get(leg.adapter.name) == leg.adapter.checksum)
            for shard in node.witness.shards.values()
        )


def _prompt(request: Request) -> tuple[object, ...]:
    """Returns what the KV depends on, and the request itself."""
    name = request.request_id.split("~")[0]
    return name, request.model, request.adapter, request.tenant, tuple(request.prompt_token_ids), request.sampling
