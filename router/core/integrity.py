"""Asserts the core's invariants, for tests and simulation: it reads the whole state."""

from __future__ import annotations

import math
from collections import Counter

from router.core.dispatch.attempt_sender import AttemptSender
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.fleet.fleet import Fleet
from router.core.held_calls import MAX_CALL_SHARE
from router.core.live import LiveRequest, QueueId
from router.core.load.load_ledger import LoadLedger
from router.core.placement.placer import Placer
from router.core.prefix_index.prefix_index import PrefixIndex
from router.core.relay.lifecycle import Lifecycle
from router.core.relay.screening import Screening


def check(
    fleet: Fleet,
    lifecycle: Lifecycle,
    attempt_sender: AttemptSender,
    placer: Placer,
    ledger: LoadLedger,
    index: PrefixIndex,
    screening: Screening,
) -> None:
    index.check_integrity()
    fleet.check_integrity()
    ledger.check_integrity()
    screening.check_integrity()
    _check_shards(fleet, ledger)
    _check_clients(lifecycle)
    _check_queue(attempt_sender.queue, placer, ledger, fleet)
    queued = {id(live) for live in attempt_sender.queue.queues}
    for request_id, live in lifecycle.requests.items():
        assert live.request.request_id == request_id
        assert live.is_queued == (id(live) in queued)
        assert live.is_queued or live.unschedulable_at is None
        _check_request(live, fleet)


def _check_shards(fleet: Fleet, ledger: LoadLedger) -> None:
    """A slot is in use exactly while an attempt has it, and a reservation is held exactly while its attempt has
    slots."""
    held = set()
    for shard in fleet.shards.values():
        assert shard.slots.num_allocated == len(shard.attempts)
        assert shard.choices.keys() <= shard.attempts.keys()
        num_slots: dict[tuple[str, int], int] = {}
        for attempt in shard.attempts.values():
            assert attempt.shard_id == shard.shard_id
            num_slots[attempt.key] = num_slots.get(attempt.key, 0) + 1
        for attempt in shard.attempts.values():
            assert attempt.num_open_slots == num_slots[attempt.key]
        tenants = Counter(attempt.tenant for attempt in shard.attempts.values() if attempt.tenant is not None)
        assert tenants == shard.num_by_tenant
        shard.fast_path.check_integrity()
        for slot, choice in shard.choices.items():
            assert not choice.is_done
            assert (choice.shard_id, choice.shard_slot) == (shard.shard_id, slot)
        held |= num_slots.keys()
    assert ledger.keys() == held


def _check_clients(lifecycle: Lifecycle) -> None:
    for client in lifecycle.clients.values():
        assert client.choices
        assert client.step is None
        for slot, choice in client.choices.items():
            assert choice.client is client
            assert choice.client_slot == slot
            assert not choice.is_done
            assert lifecycle.requests[choice.request.request.request_id] is choice.request


def _check_queue(queue: DispatchQueue, placer: Placer, ledger: LoadLedger, fleet: Fleet) -> None:
    """No request waits for any shard while one that could run it has room, or although no shard ever could, unless an
    earlier one of its tenant has no turn. A request that waits for a certain shard was placed there, and there is a
    time at which that is reconsidered."""
    lines = queue.queues
    assert len(lines) == sum(1 for _ in lines)
    assert lines.num_untouched == sum(not live.has_prefill for live in lines)
    assert Counter((live.request.model, live.priority_class.rank) for live in lines) == lines.counts()
    held: dict[str, set[str]] = {shard_id: set() for shard_id in fleet.shards}
    stopped: set[tuple[QueueId, str, str, str]] = set()
    for live in lines:
        assert live.num_open_choices
        assert live.pending
        assert placer.eligibility.eligible(live) or live.unschedulable_at is not None
        assert live.queue_id is not None
        if live.queue_id.shard_id:
            held[live.queue_id.shard_id].add(live.request.request_id)
            shard = fleet.shards[live.queue_id.shard_id]
            assert not shard.is_draining
            assert live.prefill_chunk is None or shard.attempts[live.prefill_chunk[1]] is live.prefill_chunk[0]
            assert queue.next_deadline() < math.inf
        else:
            assert live.prefill_chunk is None
            turn = (live.queue_id, live.priority_class.name, live.request.tenant, live.request.fairness_id)
            if not placer.eligibility.any_has_room(live):
                stopped.add(turn)
            others_wait = lines.num_waiting(live.request.model) > lines.num_in(live.queue_id)
            may_wait = turn in stopped or (live.queue_id.is_parked and others_wait)
            assert may_wait or not placer.eligibility.can_run(live)
    for shard_id, request_ids in held.items():
        assert ledger.view(shard_id).held.keys() == request_ids


def _check_request(live: LiveRequest, fleet: Fleet) -> None:
    """Every open choice waits, runs, or has its end withheld; withheld output is within its bound."""
    open_choices = [choice for choice in live.choices if not choice.is_done]
    assert live.num_open_choices == len(open_choices) > 0
    assert (live.is_queued or live.is_held or live.has_leg) == bool(live.pending)
    assert live.is_queued + live.is_held + live.has_leg <= 1
    if live.has_leg:
        assert live.split is not None
        assert fleet.shards[live.split.prefill_shard_id].attempts[live.split.slot] is live.split.attempt
    for choice in open_choices:
        is_pending = choice in live.pending
        is_running = bool(choice.shard_id)
        is_over = choice.withheld is not None and choice.withheld.finish is not None
        assert is_pending + is_running + is_over == 1
        if is_running:
            assert fleet.shards[choice.shard_id].choices[choice.shard_slot] is choice
        if choice.withheld is not None:
            assert choice.withheld.num_tokens == sum(len(entry[0]) for entry in choice.withheld.entries)
            max_tokens = live.max_uncleared_tokens * (1 if choice.withheld.calls is None else MAX_CALL_SHARE)
            assert choice.withheld.num_tokens <= max_tokens
        else:
            assert not live.prompt_verdict_open
