"""Sends requests to shards, and frees what was reserved when they end there."""

from __future__ import annotations

from typing import Final

import xxhash

from router.core.actions import PlacementDecided, SubmitAttempt
from router.core.dispatch_queue import DispatchQueue
from router.core.events import ChoiceSpec, Request
from router.core.fleet import Fleet, Shard
from router.core.live import Attempt, Choice, LiveRequest
from router.core.load_ledger import LoadLedger, Reservation
from router.core.outbox import Outbox
from router.core.placement.placer import Placer
from router.core.placement.policy import Candidate
from router.core.prefix_index import PrefixIndex

PROBE_CLIENT_ID: Final = "router-probe"
"""The name under which a router asks shards for a token, to see whether they are well. Never metered."""
PROBE_TOKEN_IDS: Final = (0,)


class Dispatcher:
    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        ledger: LoadLedger,
        placer: Placer,
        outbox: Outbox,
        decision_sample_share: float,
    ) -> None:
        self.queue = DispatchQueue(fleet, ledger, placer, self._send)
        self._index = index
        self._ledger = ledger
        self._placer = placer
        self._outbox = outbox
        self._num_dispatches = 0
        self._decision_sample_limit = int(decision_sample_share * 2**64)

    def _send(self, live: LiveRequest, shard: Shard, candidate: Candidate, now: float) -> None:
        """Send all pending choices to one shard."""
        request = live.request
        window = shard.description.max_model_len - len(request.prompt_token_ids)
        max_tokens = window if request.max_tokens is None else min(request.max_tokens, window)
        live.num_attempts += 1
        live.last_shard_id = shard.shard_id
        if live.first_dispatched_at is None:
            live.first_dispatched_at = now
        if self._decision_sample_limit:
            self._tell_decision(live, shard, now)
        self._num_dispatches += 1
        attempt = Attempt(
            request.request_id, live.num_attempts, self._num_dispatches, shard.shard_id, len(live.pending), now
        )
        self._reserve(live, shard, candidate, attempt, now)
        specs = [self._assign_slot(choice, shard, attempt, max_tokens) for choice in live.pending]
        live.pending = []
        live.hashes = {}
        num_expected = candidate.num_overlap_tokens
        self._outbox.add(SubmitAttempt(shard.shard_id, attempt.attempt_id, request, specs, max_tokens, num_expected))

    def send_probe(self, shard: Shard, now: float) -> int:
        """One token, of which no client hears; returns its slot."""
        slot = shard.slots.allocate()
        self._num_dispatches += 1
        number = self._num_dispatches
        request = Request(
            f"{PROBE_CLIENT_ID}-{number}", PROBE_CLIENT_ID, shard.description.model, PROBE_TOKEN_IDS, "", ()
        )
        attempt = shard.attempts[slot] = Attempt(request.request_id, 1, number, shard.shard_id, 1, now)
        self._ledger.reserve(attempt.key, Reservation(shard.shard_id, 1, len(PROBE_TOKEN_IDS), 0, 1, now))
        self._outbox.add(SubmitAttempt(shard.shard_id, 1, request, [ChoiceSpec(slot, 0)], 1, 0))
        return slot

    def end_slot(self, shard: Shard, slot: int, now: float) -> bool:
        """The shard has ended a slot, which is free again. False for a slot that was not in use."""
        attempt = shard.attempts.pop(slot, None)
        if attempt is None:
            return False
        shard.slots.free(slot)
        self._end_one(attempt, now)
        self.queue.stir(shard.shard_id)
        return True

    def end_all_slots(self, shard: Shard, now: float) -> list[Choice]:
        """The shard is gone. Returns the choices that were running there."""
        for attempt in shard.attempts.values():
            self._end_one(attempt, now)
        shard.attempts.clear()
        lost = list(shard.choices.values())
        for choice in lost:
            shard.detach(choice)
        return lost

    def _end_one(self, attempt: Attempt, now: float) -> None:
        attempt.num_open_slots -= 1
        if not attempt.num_open_slots:
            self._ledger.release(attempt.key, now)

    def _tell_decision(self, live: LiveRequest, shard: Shard, now: float) -> None:
        request = live.request
        if xxhash.xxh3_64_intdigest(request.request_id.encode()) >= self._decision_sample_limit:
            return
        plan = self._placer.explain_pick(live, shard.shard_id, now)
        block_size = shard.description.block_size
        hashes = self._placer.hashes(live, block_size)
        self._outbox.add(PlacementDecided(request, live.num_attempts, plan, block_size, hashes, now))

    def _reserve(self, live: LiveRequest, shard: Shard, candidate: Candidate, attempt: Attempt, now: float) -> None:
        block_size = candidate.block_size
        num_prompt_blocks = -(-live.num_context_tokens // block_size)
        reservation = Reservation(
            shard_id=shard.shard_id,
            num_sequences=len(live.pending),
            num_prefill_tokens=candidate.num_prefill_tokens,
            num_cached_tokens=candidate.num_overlap_tokens,
            num_blocks=num_prompt_blocks,
            placed_at=now,
        )
        self._ledger.reserve(attempt.key, reservation)
        self._index.place(shard.shard_id, self._placer.hashes(live, block_size), now)
        self._placer.note_placed(live, shard, now)

    def _assign_slot(self, choice: Choice, shard: Shard, attempt: Attempt, max_tokens: int) -> ChoiceSpec:
        slot = shard.slots.allocate()
        choice.max_tokens = max_tokens
        choice.shard_id = shard.shard_id
        choice.shard_slot = slot
        choice.num_attempts += 1
        shard.choices[slot] = choice
        shard.attempts[slot] = attempt
        return ChoiceSpec(slot, choice.index, tuple(choice.output_token_ids), choice.num_given_chars + choice.num_chars)
