"""Long prompts may be computed on one shard and answered by another. Decode steps are then never delayed by the prompts
of others (DistServe, Zhong et al. 2024; Splitwise, Patel et al. 2024).

    the request is placed on a shard for its answer, which would have to compute a long prompt
      → a leg is sent to a prefill shard: the prompt, of which the shard computes the KV and the first token
      → the leg ends with a hand-off, and the request is placed again, among the shards that can fetch the KV
      → the attempt carries the hand-off; its shard emits the first token again, and the rest of the answer

The prefill shard is chosen like any other, by cached prefix and load; the decode shard by load, since all KV comes to
it. A leg produces nothing that a client gets. When it fails, it is sent to another prefill shard, and after MAX_LEGS
the request is computed whole. When the attempt fails, the request continues like any other: the hand-off is used once.

A prefill shard keeps KV until it is fetched. TensorRT-LLM, for one, frees it neither for a cancel nor otherwise before
a long timeout. So a hand-off that no answer needs, as its request has ended or its leg was given up, is collected:
sent to a decode shard with a request for one token, which reaches no client. It is never sent twice, because a second
fetch can block the engine that has the KV. That of an attempt whose shard is lost is therefore left to the timeout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final, Protocol

from kvloom.v1.generation_pb2 import FINISH_REASON_ERROR
from router.core.action_buffer import ActionBuffer
from router.core.actions import CancelOnShard, LegOutcome, PrefillLegCounted, SubmitAttempt
from router.core.dispatch.prefill_chunks import preparing
from router.core.dispatch.service_counters import ServiceCounters
from router.core.events import SHADOW_TIER, ChoiceSpec, ShardDescription
from router.core.fleet.fleet import HANDOFF_LOGPROBS, Fleet, Shard
from router.core.frames import Finish
from router.core.live import Attempt, LiveRequest, PrefillHandoff
from router.core.load.load_ledger import LoadLedger
from router.core.load.load_view import Reservation
from router.core.placement.placer import Placer
from router.core.placement.policy import Candidate
from router.core.prefix_index.prefix_index import PrefixIndex
from router.core.rule_settings import DisaggregationSettings

MAX_LEGS: Final = 2
"""The most legs of one request. After them it is computed whole."""


def _yes(_sampling: object) -> bool:
    return True


def _no(_sampling: object) -> bool:
    return False


@dataclasses.dataclass(frozen=True, slots=True)
class HandoffAbilities:
    """Tells the core about sampling, which it does not read."""

    can_hand_over: Callable[[object], bool] = _yes
    """Returns True when engines hand over all state of an answer with this sampling."""
    wants_logprobs: Callable[[object], bool] = _no
    """Returns True when an answer with this sampling has log-probabilities, which only shards with HANDOFF_LOGPROBS
    hand over."""


class WaitingRequests(Protocol):
    """The part of DispatchQueue that legs use; the queue sends legs, so it cannot be imported here."""

    check_unschedulable: bool

    def enter(self, live: LiveRequest, now: float) -> None:
        """Place the request."""

    def wait_for_any(self, live: LiveRequest, now: float) -> None:
        """Place the request soon."""


class PrefillHandoffs:
    """Sends the legs, and takes their hand-offs."""

    def __init__(
        self,
        settings: DisaggregationSettings,
        abilities: HandoffAbilities,
        fleet: Fleet,
        placer: Placer,
        ledger: LoadLedger,
        index: PrefixIndex,
        service: ServiceCounters,
        action_buffer: ActionBuffer,
        add_deadline: Callable[[float, LiveRequest], None],
        next_dispatch_number: Callable[[], int],
        tell_decision: Callable[[LiveRequest, Shard, float], None],
    ) -> None:
        self._settings = settings
        self._abilities = abilities
        self._fleet = fleet
        self._placer = placer
        self._ledger = ledger
        self._index = index
        self._service = service
        self._action_buffer = action_buffer
        self._add_deadline = add_deadline
        self._next_dispatch_number = next_dispatch_number
        self._tell_decision = tell_decision
        self.queue: WaitingRequests

    def begin(self, live: LiveRequest, candidate: Candidate, now: float) -> bool:
        """Send a leg of a request that would be sent to the shard of `candidate`. Returns whether one was sent; the
        request then waits for its end."""
        if candidate.num_prefill_tokens < self._settings.min_prompt_tokens or not _can_split(live):
            return False
        if not self._abilities.can_hand_over(live.request.sampling):
            return False
        split = live.split
        if split is not None and (split.handoff or split.num_legs >= MAX_LEGS):
            return False
        shards = self._shards_for(live)
        if not shards:
            return False
        shard, on_prefill = self._placer.pick_among(shards, live, now)
        if split is None:
            split = live.split = PrefillHandoff()
        self._send(live, split, shard, on_prefill, now)
        return True

    def _shards_for(self, live: LiveRequest) -> list[Shard]:
        """The prefill shards that can take the leg, and whose KV another shard could fetch."""
        ready = self._fleet.ready(live.request.model)
        avoided = "" if live.split is None else live.split.prefill_shard_id
        adapter = live.request.adapter
        needs_logprobs = self._abilities.wants_logprobs(live.request.sampling)
        return [
            shard
            for shard in ready
            if shard.computes_prompts
            and (not needs_logprobs or HANDOFF_LOGPROBS in shard.description.capabilities)
            and shard.shard_id != avoided
            and not shard.is_suspected
            and shard.description.max_model_len >= live.min_window
            and (adapter is None or shard.adapters.has(adapter))
            and self._placer.eligibility.has_room(shard, live)
            and any(other.can_fetch_from(shard.description) for other in ready)
        ]

    def _send(self, live: LiveRequest, split: PrefillHandoff, shard: Shard, candidate: Candidate, now: float) -> None:
        request = live.request
        if live.first_dispatched_at is None:
            self._service.note_first_dispatch(live, candidate.num_prefill_tokens, now)
        self._tell_decision(live, shard, now)
        split.num_legs += 1
        leg = preparing(request, f"prefill-{split.num_legs}")
        attempt = Attempt(leg.request_id, 0, self._next_dispatch_number(), shard.shard_id, 1, now, request.tenant)
        attempt.prepares = live
        reservation = Reservation(
            shard_id=shard.shard_id,
            num_sequences=1,
            num_prefill_tokens=candidate.num_prefill_tokens,
            num_cached_tokens=candidate.num_overlap_tokens,
            num_new_blocks=candidate.num_needed_blocks,
            placed_at=now,
            is_prefill_chunk=True,
            class_rank=live.priority_class.rank,
        )
        self._ledger.reserve(attempt.key, reservation)
        hashes = live.prompt_hashes(candidate.block_size)
        if not request.discards_blocks:
            self._index.place(shard.shard_id, hashes, now)
        if request.adapter is not None:
            shard.adapters.note_sent(request.adapter, now)
        slot = shard.open_slot(attempt)
        split.begin_leg(attempt, slot, shard.description, now + self._settings.leg_timeout_seconds)
        self._add_deadline(split.leg_expires_at, live)
        self._action_buffer.add(PrefillLegCounted(shard.shard_id, request.model))
        self._action_buffer.add(
            SubmitAttempt(
                shard.shard_id,
                0,
                leg,
                [ChoiceSpec(slot, 0)],
                1,
                candidate.num_overlap_tokens,
                prepares=request.request_id,
                prefill_only=True,
            )
        )

    def note_start(self, attempt: Attempt, num_cached_tokens: int) -> bool:
        """The prompt has been computed. Returns whether the attempt is a leg that is still wanted."""
        split = _split_of(attempt)
        if split is None:
            return False
        split.num_cached_tokens = num_cached_tokens
        return True

    def on_end(self, attempt: Attempt, finish: Finish, now: float) -> None:
        """A shard has ended an attempt without a choice, perhaps a leg."""
        live, split = attempt.prepares, _split_of(attempt)
        if live is None:
            return
        if split is None:
            if finish.handoff:
                self._collect(live, self._source_of(attempt, live), finish.handoff, now)
            return
        split.end_leg()
        if finish.handoff:
            split.handoff = finish.handoff
            self.queue.check_unschedulable = True
            self.queue.enter(live, now)
            return
        if finish.error is None:
            split.num_legs = MAX_LEGS  # the answer has one token, or the engine hands nothing over
        outcome = LegOutcome.FAILED if finish.reason == FINISH_REASON_ERROR else LegOutcome.NOTHING_HANDED_OVER
        self._count(live, split, outcome)
        self._wait(live, now)

    def _source_of(self, attempt: Attempt, live: LiveRequest) -> ShardDescription | None:
        """The shard that has the KV of a hand-off that no answer needs: that of a leg which was given up when it had
        ended there, or that from which an attempt should have fetched it which was refused when its answer had ended.
        """
        if not attempt.attempt_id:
            return self._fleet.shards[attempt.shard_id].description
        return None if live.split is None else live.split.prefill_shard

    def on_shard_lost(self, attempts: list[Attempt], now: float) -> None:
        """The shard that had these attempts is gone."""
        for attempt in attempts:
            live, split = attempt.prepares, _split_of(attempt)
            if live is not None and split is not None:
                split.end_leg()
                self._count(live, split, LegOutcome.SHARD_LOST)
                self._wait(live, now)

    def move_off(self, shard: Shard, now: float) -> None:
        """The shard is suspected, or hands its work over: its legs are sent elsewhere."""
        for attempt in list(shard.attempts.values()):
            live, split = attempt.prepares, _split_of(attempt)
            if live is not None and split is not None:
                self._give_up(live, split, attempt, LegOutcome.MOVED)
                self._wait(live, now)

    def expire(self, live: LiveRequest, now: float) -> None:
        """If the request waits for a leg that takes too long, it is placed again."""
        split = live.split
        if split is not None and split.attempt is not None:
            self._give_up(live, split, split.attempt, LegOutcome.TIMED_OUT)
            self._wait(live, now)

    def cancel(self, live: LiveRequest, split: PrefillHandoff, now: float) -> None:
        """The request ends: it needs neither its leg nor a hand-off."""
        handoff = split.handoff
        if split.attempt is not None:
            self._give_up(live, split, split.attempt, LegOutcome.CANCELLED)
        elif handoff:
            split.take_handoff(is_usable=False)
            if not split.is_counted:
                self._count(live, split, LegOutcome.CANCELLED)
            self._collect(live, split.prefill_shard, handoff, now)

    def _collect(self, live: LiveRequest, prefill: ShardDescription | None, handoff: bytes, now: float) -> None:
        """Have KV fetched that no answer needs, so that the shard that has it frees it. If no shard can fetch it, it is
        left to that shard's timeout."""
        request, num_tokens = live.request, len(live.request.prompt_token_ids)
        if prefill is None or not self._fleet.has(prefill):
            return
        shards = [
            shard
            for shard in self._fleet.ready(request.model)
            if shard.can_fetch_from(prefill)
            and not shard.is_suspected
            and shard.description.max_model_len > num_tokens
            and (request.adapter is None or shard.adapters.has(request.adapter))
        ]
        if not shards:
            return
        # It does not wait for room: requests end with unused KV just when decode shards are full.
        shard = min(shards, key=lambda one: (not one.has_room, len(one.attempts), one.shard_id))
        collection = preparing(request, "collection", stop=None)
        number = self._next_dispatch_number()
        attempt = Attempt(collection.request_id, 0, number, shard.shard_id, 1, now, None)
        reservation = Reservation(
            shard_id=shard.shard_id,
            num_sequences=1,
            num_prefill_tokens=1,
            num_cached_tokens=num_tokens - 1,
            num_new_blocks=-(-num_tokens // shard.description.block_size),
            placed_at=now,
            is_prefill_chunk=True,
            is_arrival=False,
            class_rank=live.priority_class.rank,
        )
        self._ledger.reserve(attempt.key, reservation)
        slot = shard.open_slot(attempt)
        self._action_buffer.add(
            SubmitAttempt(shard.shard_id, 0, collection, [ChoiceSpec(slot, 0)], 1, num_tokens - 1, handoff=handoff)
        )

    def note_handoff(self, live: LiveRequest, split: PrefillHandoff, *, is_used: bool) -> None:
        """An attempt is sent with the hand-off, or without it as the prefill shard is gone."""
        if not split.is_counted:
            self._count(live, split, LegOutcome.USED if is_used else LegOutcome.SHARD_LOST)

    def _wait(self, live: LiveRequest, now: float) -> None:
        """There may be no shard any more that can run the request, which it has not noticed as long as it had a leg."""
        self.queue.check_unschedulable = True
        self.queue.wait_for_any(live, now)

    def _give_up(self, live: LiveRequest, split: PrefillHandoff, attempt: Attempt, outcome: LegOutcome) -> None:
        self._action_buffer.add(CancelOnShard(attempt.shard_id, [split.slot]))
        split.end_leg()
        self._count(live, split, outcome)

    def _count(self, live: LiveRequest, split: PrefillHandoff, outcome: LegOutcome) -> None:
        split.is_counted = True
        self._action_buffer.add(PrefillLegCounted(split.prefill_shard_id, live.request.model, outcome))


def _split_of(attempt: Attempt) -> PrefillHandoff | None:
    """None unless it is the leg for whose end its request waits."""
    live = attempt.prepares
    if live is None or live.split is None or live.split.attempt is not attempt:
        return None
    return live.split


def _can_split(live: LiveRequest) -> bool:
    """True when it is a first attempt of one answer of several tokens, of which engines can hand over all state."""
    request = live.request
    return not (
        live.num_attempts
        or live.num_prefill_chunks
        or len(live.choices) != 1
        or live.choices[0].output_token_ids
        or request.pooling is not None
        or request.max_tokens == 1
        or request.max_cached_tokens is not None
        or request.tier is SHADOW_TIER
    )
