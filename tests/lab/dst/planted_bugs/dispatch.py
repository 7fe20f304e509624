"""Planted bugs in what is sent to shards, what waits for them, and the bookkeeping of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lab.dst.checkers import (
    AttemptsContinue,
    Fence,
    Integrity,
    LoadExact,
    MovesCounted,
    NoIdleWait,
    NoStarvation,
    NoWaitBesideIdle,
    PlacementsFit,
    PrefillChunksFit,
    QueueBound,
    SlotsExclusive,
    VariantsKept,
)
from router.core.admission.arrivals import Arrivals
from router.core.dispatch.attempt_sender import AttemptSender
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.dispatch.replacement import Replacements
from router.core.dispatch.waiting_queues import WaitingQueues
from router.core.events import Request, ShardLoad
from router.core.fleet.fleet import Fleet, Shard
from router.core.fleet.slot_pool import SlotPool
from router.core.frames import Step
from router.core.live import Choice, LiveRequest, QueueId
from router.core.load.load_ledger import LoadLedger
from router.core.placement.ect import Ect
from router.core.placement.eligibility import Eligibility
from router.core.placement.policy import Candidate
from router.core.relay import lifecycle
from router.core.relay.lifecycle import Lifecycle
from router.core.request_end import RelocationCounts
from tests.lab.dst.planted_bugs.change_steps import change_steps
from tests.lab.dst.planted_bugs.registry import Patch, caught_by


@caught_by(Integrity)
def keeps_reservations_of_cancelled_sequences(patch: Patch) -> None:
    """The reservation of a cancelled sequence is never released."""
    original = AttemptSender.end_slot

    def end_slot(self: AttemptSender, shard: Shard, slot: int) -> bool:
        if slot in shard.choices or slot not in shard.attempts:
            return original(self, shard, slot)
        del shard.attempts[slot]
        shard.slots.free(slot)
        return True

    patch.setattr(AttemptSender, "end_slot", end_slot)


@caught_by(LoadExact)
def never_forgets_a_placement(patch: Patch) -> None:
    """The ledger drops a reservation, but not the load that it stood for."""
    original = LoadLedger.release

    def release(self: LoadLedger, key: Any) -> None:
        view = self.view(self._reservations[key].shard_id)
        original(self, key)
        view.foreign_running += 1

    original_report = LoadLedger.report

    def report(self: LoadLedger, shard_id: str, load: ShardLoad) -> None:
        view = self.view(shard_id)
        num_running = view.foreign_running
        original_report(self, shard_id, load)
        view.foreign_running = max(view.foreign_running, num_running)

    patch.setattr(LoadLedger, "release", release)
    patch.setattr(LoadLedger, "report", report)


@caught_by(Fence)
def has_no_fence(patch: Patch) -> None:
    """Output of slots that are not in use is delivered to any choice there."""

    def change(shard: Shard, step: Step) -> None:
        if shard.choices and not step.num_tokens:
            someone = next(iter(shard.choices))
            step.slots[:] = [slot if slot in shard.attempts else someone for slot in step.slots]

    change_steps(patch, change)


@caught_by(SlotsExclusive)
def reuses_slots_of_cancelled_sequences(patch: Patch) -> None:
    """A slot counts as free as soon as its sequence is cancelled."""
    original = Lifecycle._leave_shard

    def leave_shard(self: Lifecycle, choice: Choice, now: float) -> None:
        if choice.shard_id:
            self._fleet.shards[choice.shard_id].slots._resting.appendleft(choice.shard_slot)
        original(self, choice, now)

    def allocate(self: SlotPool) -> int:
        if self._resting:
            return self._resting.popleft()
        self._next += 1
        return self._next

    patch.setattr(Lifecycle, "_leave_shard", leave_shard)
    patch.setattr(SlotPool, "allocate", allocate)


@caught_by(AttemptsContinue)
def restarts_from_the_prompt(patch: Patch) -> None:
    """A later attempt starts from the prompt, without the tokens that the client has."""
    original = AttemptSender._assign_slot

    def assign_slot(self: AttemptSender, *args: Any) -> Any:
        spec = original(self, *args)
        return msgspec.structs.replace(spec, output_token_ids=(), num_delivered_chars=0)

    patch.setattr(AttemptSender, "_assign_slot", assign_slot)


@caught_by(AttemptsContinue)
def never_stops_trying(patch: Patch) -> None:
    """The limit on attempts is off by one."""
    original = Lifecycle.__init__

    def init(self: Lifecycle, *args: Any, **others: Any) -> None:
        original(self, *args[:-1], args[-1] + 1, **others)

    patch.setattr(Lifecycle, "__init__", init)


@caught_by(AttemptsContinue)
def tries_a_poison_request_everywhere(patch: Patch) -> None:
    """A request with which two shards have died before it had any output is sent to a third one."""
    patch.setattr(lifecycle, "MAX_STRIKES", 99)


@caught_by(MovesCounted)
def forgets_failovers(patch: Patch) -> None:
    """A record does not say that its answer survived a shard."""
    patch.setattr(RelocationCounts, "with_failover", lambda self: self)


@caught_by(PlacementsFit)
def sends_work_to_draining_shards(patch: Patch) -> None:
    """A draining shard still gets new work."""

    def find_ready(self: Fleet, model: str) -> list[Shard]:
        return [shard for shard in self.shards.values() if shard.description.model == model]

    patch.setattr(Fleet, "_find_ready", find_ready)


@caught_by(NoIdleWait)
def serves_only_the_head_of_the_queue(patch: Patch) -> None:
    """A request that no free shard can run blocks all requests behind it."""

    def take(self: WaitingQueues, queue_id: QueueId, can_run: Callable[[LiveRequest], bool], *_: Any, **__: Any) -> Any:
        first = next(self.queue(queue_id), None)
        if first is None or not can_run(first):
            return None
        self.remove(first)
        return first

    patch.setattr(WaitingQueues, "take", take)


@caught_by(NoIdleWait)
def lets_unschedulable_requests_wait(patch: Patch) -> None:
    """A request whose last shard has disconnected waits for its timeout."""
    patch.setattr(Lifecycle, "give_up", lambda _self, _live, _now: None)


@caught_by(NoStarvation, first_seed=190)
def prefers_one_tenant(patch: Patch) -> None:
    """The tenant that was served first is served again as long as it has requests waiting."""

    def take(self: WaitingQueues, queue_id: QueueId, can_run: Callable[[LiveRequest], bool], *_: Any, **__: Any) -> Any:
        for request in sorted(self.queue(queue_id), key=lambda live: live.request.tenant):
            if can_run(request):
                self.remove(request)
                return request
        return None

    patch.setattr(WaitingQueues, "take", take)


@caught_by(QueueBound)
def counts_the_queue_before_it_grows(patch: Patch) -> None:
    """One more request may wait than is configured."""
    original = Arrivals._make_queue_place

    def make_queue_place(self: Arrivals, request: Request, now: float) -> bool:
        return len(self._queue) == self._config.max_queued_requests or original(self, request, now)

    patch.setattr(Arrivals, "_make_queue_place", make_queue_place)


@caught_by(PrefillChunksFit)
def forgets_prefill_chunks_of_requests_that_leave(patch: Patch) -> None:
    """The prefill chunk of a request that ends or moves is computed all the same."""

    def cancel_prefill_chunk(_self: AttemptSender, live: LiveRequest, _shard_id: str) -> None:
        live.prefill_chunk = None
        live.num_ready_tokens = 0

    patch.setattr(AttemptSender, "cancel_prefill_chunk", cancel_prefill_chunk)


@caught_by(PrefillChunksFit)
def sends_the_next_prefill_chunk_early(patch: Patch) -> None:
    """A request whose prefill chunk is being computed is sent again when the shard has room."""
    original = WaitingQueues.take

    def take(self: WaitingQueues, queue_id: QueueId, can_run: Any, *args: Any, **kwargs: Any) -> LiveRequest | None:
        return original(self, queue_id, (lambda _live: True) if queue_id.shard_id else can_run, *args, **kwargs)

    patch.setattr(WaitingQueues, "take", take)


@caught_by(VariantsKept, max_seeds=200)
def continues_on_any_variant(patch: Patch) -> None:
    """An answer continues on the cheapest shard, although its tokens are others there."""

    def open_shards(self: Eligibility, live: LiveRequest) -> list[Shard]:
        return [shard for shard in self.eligible(live) if shard.has_room]

    patch.setattr(Eligibility, "open_shards", open_shards)


@caught_by(VariantsKept, max_seeds=200)
def hides_that_a_variant_has_changed(patch: Patch) -> None:
    """The router does not report that an answer is no longer exact."""
    patch.setattr(LiveRequest, "continues_answer", False)


@caught_by(NoWaitBesideIdle)
def believes_its_predictions_for_ever(patch: Patch) -> None:
    """Queues and memory count as nothing, a shard takes nothing that waits for it, and a request that waits longer than
    predicted never goes to a shard that has nothing to do."""

    def cost(_self: Ect, c: Candidate) -> tuple[float, ...]:
        return (0.0, c.own_seconds, *(0.0,) * (len(Ect.terms) - 2))

    patch.setattr(Ect, "_cost", cost)
    patch.setattr(Replacements, "idle_instead", lambda *_: None)
    patch.setattr(Replacements, "stealable", lambda *_: None)
    patch.setattr(DispatchQueue, "_take", lambda *_: None)
