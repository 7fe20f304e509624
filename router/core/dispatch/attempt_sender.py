"""Sends requests to shards, and releases their reservations when they end there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvloom.sampling import is_greedy
from kvloom.v1.generation_pb2 import Pooling, SamplingParams
from router.core.action_buffer import ActionBuffer
from router.core.actions import AnswerResampled, CancelOnShard, PlacementDecided, SubmitAttempt
from router.core.dispatch.dispatch_queue import DispatchQueue
from router.core.dispatch.fair_shares import FairShares
from router.core.dispatch.prefill_chunks import MAX_PREFILL_CHUNKS, PrefillChunkSettings, preparing
from router.core.dispatch.prefill_handoffs import HandoffAbilities, PrefillHandoffs
from router.core.dispatch.prefix_copies import COPY_NAME, MIN_COPIED_TOKENS, Copy, PrefixCopies
from router.core.dispatch.service_counters import ServiceCounters
from router.core.events import SHADOW_TIER, ChoiceSpec, Request
from router.core.fleet.fleet import BATCH_INVARIANT, SEEDED_RESUME, Fleet, Shard
from router.core.live import Attempt, Choice, LiveRequest, PrefillHandoff
from router.core.load.load_ledger import LoadLedger
from router.core.load.load_view import Reservation
from router.core.placement.placer import Placer
from router.core.placement.policy import Candidate
from router.core.prefix_index.prefix_index import PrefixIndex
from router.core.rule_settings import DisaggregationSettings

PROBE_CLIENT_ID: Final = "router-probe"
"""The client name under which a router asks a shard for one token, to probe its health. Never metered."""
PROBE_TOKEN_IDS: Final = (0,)


class AttemptSender:
    """Sends attempts, prefill chunks and probes to shards, and records what each of them reserves."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        ledger: LoadLedger,
        placer: Placer,
        action_buffer: ActionBuffer,
        prefill_chunks: PrefillChunkSettings | None,
        fair_shares: FairShares,
        service: ServiceCounters,
        disaggregation: DisaggregationSettings,
        handoffs: HandoffAbilities,
        add_deadline: Callable[[float, LiveRequest], None],
    ) -> None:
        self._next_dispatch_number = itertools.count(1).__next__
        self.legs = PrefillHandoffs(
            disaggregation,
            handoffs,
            fleet,
            placer,
            ledger,
            index,
            service,
            action_buffer,
            add_deadline,
            self._next_dispatch_number,
            self._tell_leg,
        )
        self._fleet = fleet
        self._copies = PrefixCopies(ledger, placer)
        self.queue = DispatchQueue(fleet, ledger, placer, self, prefill_chunks, fair_shares, service)
        self.legs.queue = self.queue
        self.service = service
        self._fair_shares = fair_shares
        self._index = index
        self._ledger = ledger
        self._placer = placer
        self._action_buffer = action_buffer

    def send(self, live: LiveRequest, shard: Shard, candidate: Candidate, now: float) -> None:
        """Send all pending choices to one shard."""
        request = live.request
        handoff = b""
        if live.split is not None:
            handoff, candidate = self._take_handoff(live, live.split, shard, candidate, now)
        window = shard.description.max_model_len - len(request.prompt_token_ids)
        max_tokens = window if request.max_tokens is None else min(request.max_tokens, window)
        max_tokens = int(live.capped(max_tokens))
        live.num_attempts += 1
        live.is_displaced = False
        variant = shard.description.variant
        if live.last_shard_id and live.continues_answer and not _continues_exactly(live, shard):
            live.is_exact = False
            live.moves = live.moves.resampled()
            self._action_buffer.add(
                AnswerResampled(
                    request.request_id,
                    live.last_shard_id,
                    live.variant,
                    shard.shard_id,
                    variant,
                    request.client_request_id,
                    request.traceparent,
                    request.tenant,
                )
            )
        live.variant = variant
        live.last_shard_id = shard.shard_id
        if live.first_dispatched_at is None:
            self.service.note_first_dispatch(live, candidate.num_prefill_tokens, now)
        elif live.left_at is not None:
            live.moves, live.left_at = live.moves.after_wait(now - live.left_at), None
        hashes = live.prompt_hashes(candidate.block_size)
        if not live.num_ready_tokens:
            self._tell_decision(live, shard, live.num_attempts, hashes, now)
        tenant = None if request.tier is SHADOW_TIER else request.tenant
        attempt = Attempt(
            request.request_id,
            live.num_attempts,
            self._next_dispatch_number(),
            shard.shard_id,
            len(live.pending),
            now,
            tenant,
        )
        if handoff:
            attempt.prepares = live
        if candidate.num_overlap_tokens >= MIN_COPIED_TOKENS:
            copy = self._copies.wanted(live, shard, candidate, now)
            if copy is not None:
                self._send_copy(live, copy, now)
        self._reserve(live, shard, candidate, attempt, hashes, now)
        specs = [self._assign_slot(choice, shard, attempt, max_tokens) for choice in live.pending]
        live.pending = []
        live.hashes = {}
        if tenant is not None:
            self._fair_shares.note_sent(shard, live, now)
        if request.adapter is not None:
            shard.adapters.note_sent(request.adapter, now)
        num_expected = candidate.num_overlap_tokens
        self._action_buffer.add(
            SubmitAttempt(
                shard.shard_id, attempt.attempt_id, request, specs, max_tokens, num_expected, "", False, handoff
            )
        )

    def _take_handoff(
        self, live: LiveRequest, split: PrefillHandoff, shard: Shard, candidate: Candidate, now: float
    ) -> tuple[bytes, Candidate]:
        """The hand-off for an attempt on the shard, if its prefill shard is still there, and the shard as the request
        then sees it."""
        had_handoff, prefill = bool(split.handoff), split.prefill_shard
        is_usable = prefill is not None and shard.can_fetch_from(prefill) and self._fleet.has(prefill)
        handoff = split.take_handoff(is_usable=is_usable)
        if had_handoff:
            self.legs.note_handoff(live, split, is_used=bool(handoff))
            if not handoff:
                candidate = self._placer.candidate(live, shard, now)
        return handoff, candidate

    def begin_prefill_leg(self, live: LiveRequest, candidate: Candidate, now: float) -> bool:
        """See PrefillHandoffs.begin."""
        return self.legs.begin(live, candidate, now)

    def _tell_leg(self, live: LiveRequest, shard: Shard, now: float) -> None:
        self._tell_decision(live, shard, 0, live.prompt_hashes(shard.description.block_size), now)

    def send_prefill_chunk(
        self, live: LiveRequest, shard: Shard, candidate: Candidate, num_tokens: int, now: float
    ) -> None:
        """Have the shard compute the first `num_tokens` tokens of the prompt: whole blocks."""
        if live.first_dispatched_at is None:
            self.service.note_first_dispatch(live, candidate.num_prefill_tokens, now)
        is_first = not live.num_ready_tokens
        if is_first:
            self._tell_decision(live, shard, 1, live.prompt_hashes(candidate.block_size), now)
        live.num_prefill_chunks += 1
        live.num_ready_tokens = num_tokens
        name, num_cached = str(live.num_prefill_chunks), candidate.num_overlap_tokens
        live.prefill_chunk = self._send_beginning(live, shard, name, num_tokens, num_cached, now, is_arrival=is_first)

    def _send_copy(self, live: LiveRequest, copy: Copy, now: float) -> None:
        """Have a shard compute the beginning of the prompt, for requests that come later."""
        self._send_beginning(live, copy.shard, COPY_NAME, copy.num_tokens, None, now)

    def _send_beginning(
        self,
        live: LiveRequest,
        shard: Shard,
        name: str,
        num_tokens: int,
        num_cached: int | None,
        now: float,
        *,
        is_arrival: bool = False,
    ) -> tuple[Attempt, int]:
        """Have a shard compute the first `num_tokens` tokens of the prompt, and one that no client gets. `num_cached`
        of them are there; None: they are for other requests. Returns the attempt and its slot."""
        block_size, is_own = shard.description.block_size, num_cached is not None
        hashes = live.prompt_hashes(block_size)[: num_tokens // block_size]
        request = preparing(
            live.request,
            name,
            prompt_token_ids=live.request.prompt_token_ids[:num_tokens],
            sampling=None,
            stop=None,
            block_hashes=None if live.request.block_hashes is None else {block_size: hashes},
        )
        tenant = request.tenant if is_own else None
        attempt = Attempt(request.request_id, 0, self._next_dispatch_number(), shard.shard_id, 1, now, tenant)
        if is_own:
            attempt.prepares = live
        num_cached = num_cached or 0
        reservation = Reservation(
            shard_id=shard.shard_id,
            num_sequences=1,
            num_prefill_tokens=num_tokens - num_cached,
            num_cached_tokens=num_cached,
            num_new_blocks=len(hashes) - num_cached // block_size,
            placed_at=now,
            is_prefill_chunk=True,
            is_arrival=is_arrival,
            class_rank=live.priority_class.rank,
            block_hashes=hashes,
            is_copy=not is_own,
        )
        self._ledger.reserve(attempt.key, reservation)
        self._index.place(shard.shard_id, hashes, now)
        if request.adapter is not None:
            shard.adapters.note_sent(request.adapter, now)
        slot = shard.open_slot(attempt)
        prepared = live.request.request_id if is_own else ""
        self._action_buffer.add(
            SubmitAttempt(shard.shard_id, 0, request, [ChoiceSpec(slot, 0)], 1, num_cached, prepares=prepared)
        )
        return attempt, slot

    def cancel_prefill_chunk(self, live: LiveRequest, shard_id: str) -> None:
        """The request is sent to another shard, or ends."""
        if live.prefill_chunk is not None:
            # Before it is dispatched again, so that nothing runs twice for a reader of the actions.
            self._action_buffer.add(CancelOnShard(shard_id, [live.prefill_chunk[1]]))
            live.prefill_chunk = None
        live.num_ready_tokens = live.num_prepared_tokens = 0

    def note_prefill_chunk_start(self, attempt: Attempt, num_cached_tokens: int) -> None:
        """The shard has computed a prefill chunk, of which it had found `num_cached_tokens` in its cache."""
        live = attempt.prepares
        if live is None or self.legs.note_start(attempt, num_cached_tokens):
            return
        if live.prefill_chunk is None or live.prefill_chunk[0] is not attempt:
            return
        reservation = self._ledger.reservation(attempt.key)
        live.num_prepared_tokens += max(0, reservation.num_context_tokens - num_cached_tokens)
        if num_cached_tokens < reservation.num_cached_tokens:
            # The blocks were evicted meanwhile, or this engine never keeps any.
            live.num_prefill_chunks = MAX_PREFILL_CHUNKS

    def note_answer(self, live: LiveRequest) -> None:
        """All answers of a request have ended; how long they are is learned."""
        request = live.request
        num_tokens = live.num_output_tokens / len(request.choices)
        self._ledger.expected_output.learn(request.tenant, request.model, num_tokens)

    def send_probe(self, shard: Shard, now: float) -> int:
        """Send a request for one token, or for the embedding of one, which reaches no client. Returns its slot."""
        number = self._next_dispatch_number()
        request = Request(
            f"{PROBE_CLIENT_ID}-{number}", PROBE_CLIENT_ID, shard.description.model, PROBE_TOKEN_IDS, "", ()
        )
        max_tokens = 1
        if not shard.can_generate:
            request, max_tokens = msgspec.structs.replace(request, pooling=Pooling()), 0
        attempt = Attempt(request.request_id, 1, number, shard.shard_id, 1, now, None)
        slot = shard.open_slot(attempt)
        self._ledger.reserve(attempt.key, Reservation(shard.shard_id, 1, len(PROBE_TOKEN_IDS), 0, 1, now))
        self._action_buffer.add(SubmitAttempt(shard.shard_id, 1, request, [ChoiceSpec(slot, 0)], max_tokens, 0))
        return slot

    def end_slot(self, shard: Shard, slot: int) -> bool:
        """The shard has ended a slot, which is free again. Returns False for a slot that was not in use."""
        attempt = shard.close_slot(slot)
        if attempt is None:
            return False
        self._end_one(attempt)
        self.queue.mark_dirty(shard.shard_id)
        return True

    def end_all_slots(self, shard: Shard) -> tuple[list[Choice], list[Attempt]]:
        """The shard is gone. Returns the choices that were running there, and the attempts that prepared requests."""
        preparing = [attempt for attempt in shard.attempts.values() if attempt.prepares is not None]
        for attempt in shard.attempts.values():
            self._end_one(attempt)
        shard.attempts.clear()
        shard.num_by_tenant.clear()
        lost = list(shard.choices.values())
        for choice in lost:
            shard.detach(choice)
        return lost, preparing

    def _end_one(self, attempt: Attempt) -> None:
        attempt.num_open_slots -= 1
        if not attempt.num_open_slots:
            self._ledger.release(attempt.key)
            live = attempt.prepares
            if live is not None and live.prefill_chunk is not None and live.prefill_chunk[0] is attempt:
                live.prefill_chunk = None

    def _tell_decision(
        self, live: LiveRequest, shard: Shard, attempt_id: int, hashes: Sequence[int], now: float
    ) -> None:
        request = live.request
        if not self._placer.is_explained(request.request_id):
            return
        pick = self._placer.explain_pick(live, shard.shard_id, now)
        self._action_buffer.add(PlacementDecided(request, attempt_id, pick, shard.description.block_size, hashes, now))

    def _reserve(
        self,
        live: LiveRequest,
        shard: Shard,
        candidate: Candidate,
        attempt: Attempt,
        hashes: Sequence[int],
        now: float,
    ) -> None:
        num_tokens = candidate.num_prefill_tokens + candidate.num_overlap_tokens
        num_prompt_blocks = -(-num_tokens // candidate.block_size)
        reservation = Reservation(
            shard_id=shard.shard_id,
            num_sequences=len(live.pending),
            num_prefill_tokens=candidate.num_prefill_tokens,
            num_cached_tokens=candidate.num_overlap_tokens,
            num_new_blocks=candidate.num_needed_blocks,
            placed_at=now,
            is_arrival=not live.num_ready_tokens,
            class_rank=live.priority_class.rank,
            num_expected_tokens=candidate.num_expected_tokens * len(live.pending),
            block_hashes=hashes,
        )
        self._ledger.reserve(attempt.key, reservation)
        if live.usage is not None:
            live.usage.hold(num_prompt_blocks, candidate.block_size, now)
        if not live.request.discards_blocks:
            self._index.place(shard.shard_id, hashes, now)
        self._placer.note_placed(live, shard, candidate, hashes, now)

    def _assign_slot(self, choice: Choice, shard: Shard, attempt: Attempt, max_tokens: int) -> ChoiceSpec:
        slot = shard.open_slot(attempt)
        choice.max_tokens = max_tokens
        choice.shard_id = shard.shard_id
        choice.shard_slot = slot
        choice.num_attempts += 1
        shard.choices[slot] = choice
        return ChoiceSpec(
            slot, choice.index, tuple(choice.output_token_ids), choice.num_resumed_chars + choice.num_chars
        )


def _continues_exactly(live: LiveRequest, shard: Shard) -> bool:
    """True when the shard's tokens will be those that the last shard would have computed."""
    description = shard.description
    if live.variant != description.variant:
        return False
    if SEEDED_RESUME in description.capabilities:
        return True
    sampling = live.request.sampling
    return BATCH_INVARIANT in description.capabilities and isinstance(sampling, SamplingParams) and is_greedy(sampling)
