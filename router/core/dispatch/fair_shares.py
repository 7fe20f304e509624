"""Keeps one tenant from making the others wait for its long answers.

Turns in the queue are not enough: a tenant that fills every shard with answers of minutes makes all others wait for
their ends, however their turns come. So when a request of a tenant that uses little has waited for a moment, sequences
of the tenant that uses most are preempted: they leave the shard and continue later, after the tokens they have. From
then on, a tenant with more than its share of a shard leaves a part of the batch to the others, for as long as others
come. The same holds for KV blocks, since few long answers can hold all of them while places are free. A tenant that is
alone is never limited. (Max-min fairness over the places of a shard's batch, and over its blocks; see Bertsekas and
Gallager, "Data Networks", 6.5.2.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from router.core.dispatch.block_shares import BlockShares, num_blocks_needed, num_blocks_of
from router.core.dispatch.class_shares import ClassShares
from router.core.dispatch.waiting_queues import WaitingQueues
from router.core.events import SHADOW_TIER, ShardLoad
from router.core.fleet.fleet import Fleet, Shard
from router.core.live import Attempt, Choice, LiveRequest
from router.core.load.load_ledger import LoadLedger
from router.core.priority_classes import PriorityClass
from router.core.rule_settings import FairnessSettings

MAX_MOVES: Final = 16
"""The most moves of one choice, besides its attempts: a choice that is preempted, or that runs on a fleet whose shards
are suspected or stopped one after another, must not be recomputed for ever."""

MIN_COMPETING_TOKENS: Final = 256
"""Less prefill at a time would cost more in steps than it saves in waiting."""


class Preemption(NamedTuple):
    """Sequences of one tenant that are to leave a shard."""

    shard: Shard
    tenant: str
    choices: list[Choice]
    is_for_class: bool = False
    """True when they give way to a more urgent class; otherwise to other tenants."""


class _Leaving(NamedTuple):
    """Sequences that a shard was told to stop so that their blocks become free."""

    report: ShardLoad
    """The shard's last report before that."""
    attempts: list[tuple[int, Attempt]]
    """By slot."""


class FairShares:
    """With `settings` None, tenants are not limited and nothing is preempted. Between classes only declared ones are:
    `classes`."""

    def __init__(
        self,
        settings: FairnessSettings | None,
        fleet: Fleet,
        ledger: LoadLedger,
        classes: Sequence[PriorityClass] = (),
        *,
        sends_at_once: bool = False,
    ) -> None:
        """`sends_at_once`: placed requests do not wait for their shard in the router, so that none may be placed there
        before its prefill may begin."""
        self._settings = settings
        self._sends_at_once = sends_at_once
        self._fleet = fleet
        self._ledger = ledger
        self._blocks = BlockShares(ledger)
        work_seconds = (settings or FairnessSettings()).contention_seconds
        self._classes = ClassShares(classes, fleet, self._blocks, work_seconds) if classes else None
        """None: no classes are declared, so that none has a floor and none gives way to another."""
        self._contended_until: dict[str, float] = {}
        """Models for which tenants compete."""
        self.shared_until: dict[str, float] = {}
        """Model → until when its shards count as shared. Only those of which several tenants use a shard, or did until
        lately, so that it is empty while `must_defer` and `max_prefill_tokens` have nothing to say."""
        self._now = 0.0
        self._leaving: dict[str, _Leaving] = {}
        """By shard, until it has stopped them and reported what is free."""
        self._check_at = math.inf
        self._full: set[tuple[str, str]] | None = None
        """(shard, tenant): who was found to get no block there while the queues are served. Sending makes it no better,
        and hundreds of requests of that tenant may wait."""

    # -- who may be sent -----------------------------------------------------------------------------------------

    def must_leave_room(self, shard: Shard, live: LiveRequest) -> bool:
        """True when the request's tenant has its share of the shard, and only the part that is left to the others is
        free."""
        if self._classes is not None:
            num_places = self._num_places(shard)
            share = (self._settings or FairnessSettings()).reserved_share
            if self._classes.must_leave_room(shard, live, num_places, max(1, int(num_places * share))):
                return True
        if self._sends_at_once and self.must_defer(shard, live.request.tenant):
            return True
        if not self._contended_until or shard.description.model not in self._contended_until:
            return False
        assert self._settings is not None
        num_places, tenant = self._num_places(shard), live.request.tenant
        num_reserved = max(1, int(num_places * self._settings.reserved_share))
        num_mine = shard.num_by_tenant.get(tenant, 0)
        if len(shard.attempts) >= num_places - num_reserved and num_mine >= _equal_part(num_places, shard, tenant):
            return True
        if self._full and (shard.shard_id, tenant) in self._full:
            return True
        return num_mine > 0 and self._must_leave_blocks(shard, live)

    def may_leave_room(self, model: str) -> bool:
        """Returns false if `must_leave_room` is false for all shards of the model, as where its tenants do not
        compete."""
        return self._classes is not None or self._sends_at_once or model in self._contended_until

    @property
    def has_floors(self) -> bool:
        """True when a class has a part of the shards to itself. When one of its requests is sent there, that part is no
        longer kept free, and another may have room beside it."""
        return self._classes is not None and self._classes.has_floors

    def max_prefill_tokens(self, shard: Shard, tenant: str) -> int | None:
        """The most unfinished prefill that the shard may have with the next part of the tenant's; None: any. A tenant
        above its share leaves so little unfinished that the next request of another one hardly waits for it."""
        shared_until = self.shared_until.get(shard.description.model)
        if shared_until is None:
            return None
        if shared_until <= self._now:
            del self.shared_until[shard.description.model]
            return None
        assert self._settings is not None
        num_mine = shard.num_by_tenant.get(tenant, 0)
        if num_mine * max(2, len(shard.num_by_tenant)) <= len(shard.attempts):
            return None
        view = self._ledger.view(shard.shard_id)
        seconds = self._settings.competing_prefill_seconds
        return max(MIN_COMPETING_TOKENS, view.speed.num_tokens_within(seconds, 0, view.num_context_tokens))

    def must_defer(self, shard: Shard, tenant: str) -> bool:
        """True when the shard has to finish prefill before it gets more of the tenant's."""
        if not self.shared_until:
            return False
        num_tokens = self.max_prefill_tokens(shard, tenant)
        if num_tokens is None:
            return False
        num_queued = self._ledger.view(shard.shard_id).queued_work.num_tokens
        return num_queued > 0 and num_queued + MIN_COMPETING_TOKENS > num_tokens

    def begin_serving(self, now: float) -> None:
        """Until `end_serving`, requests are only sent."""
        self._now = now
        self._full = set()
        if self._classes is not None:
            self._classes.begin_serving(now)

    def end_serving(self) -> None:
        self._full = None

    def _must_leave_blocks(self, shard: Shard, live: LiveRequest) -> bool:
        num_unreserved = self._blocks.num_free(shard) - self._num_reserved_blocks(shard)
        num_needed = num_blocks_needed(live, shard)
        if num_needed <= num_unreserved:
            return False
        tenant = live.request.tenant
        num_mine = self._blocks.held(shard).get(tenant, 0)
        share = self._block_share(shard, tenant)
        if self._full is not None and num_unreserved < 1 and num_mine >= share:
            self._full.add((shard.shard_id, tenant))
        return num_mine > 0 and num_mine + num_needed > share

    def _num_places(self, shard: Shard) -> int:
        """The places of the batch that this router divides: those that other routers' sequences leave, or if there are
        more sequences than places, a part as large as its part of the sequences."""
        batch, view, num_own = shard.description.max_batch, self._ledger.view(shard.shard_id), len(shard.attempts)
        num_foreign = view.foreign_running + view.foreign_waiting
        if num_own + num_foreign <= batch:
            return max(1, batch - num_foreign)
        return max(1, batch * num_own // (num_own + num_foreign))

    def _place_share(self, shard: Shard, tenant: str) -> int:
        return _equal_part(self._num_places(shard), shard, tenant)

    def _block_share(self, shard: Shard, tenant: str) -> int:
        return _equal_part(self._blocks.num_own(shard), shard, tenant)

    def _num_reserved_blocks(self, shard: Shard) -> int:
        assert self._settings is not None
        return max(1, int(shard.description.num_blocks * self._settings.reserved_share))

    def can_make_room(self, model: str, tenant: str, queues: WaitingQueues) -> bool:
        """True when another tenant gives way to this one, so that a first request of it waits only for a moment,
        however many of the other's wait."""
        if self._settings is None or queues.has_tenant(tenant):
            return False
        return any(
            shard.num_by_tenant.get(tenant, 0) < self._place_share(shard, tenant)
            and max(shard.num_by_tenant.values(), default=0) >= 2 * (shard.num_by_tenant.get(tenant, 0) + 1)
            for shard in self._fleet.ready(model)
        )

    def note_waiting(self, live: LiveRequest, now: float) -> None:
        """A request waits in the router."""
        self._check_later(now)
        if self._classes is not None:
            self._classes.note_work(live, now)

    def note_parked(self, live: LiveRequest, now: float) -> None:
        """A request waits without a place. It may get one from a less urgent class, but from no tenant."""
        if self._classes is not None:
            self.note_waiting(live, now)

    def _check_later(self, now: float) -> None:
        if self._settings is not None:
            self._check_at = min(self._check_at, now + self._settings.preempt_after_seconds)

    def note_sent(self, shard: Shard, live: LiveRequest, now: float) -> None:
        """A request was sent to the shard. It may wait there, for a place or for blocks."""
        self._now = now
        if self._classes is not None:
            self._classes.note_work(live, now)
        if self._settings is None or (len(shard.num_by_tenant) < 2 and self._classes is None):
            return
        if self._settings.competing_prefill_seconds:
            self.shared_until[shard.description.model] = now + self._settings.contention_seconds
        self._check_later(now)
        model, tenant = shard.description.model, live.request.tenant
        if model in self._contended_until and shard.num_by_tenant[tenant] < self._place_share(shard, tenant):
            self._contended_until[model] = now + self._settings.contention_seconds

    # -- who has to give way -------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When `preemptions` has to be asked at the latest; infinity: not before another event."""
        at = self._check_at
        if self._contended_until:
            at = min(at, min(self._contended_until.values()))
        return at if self._classes is None else min(at, self._classes.next_deadline())

    def end_contention(self, queues: WaitingQueues, now: float) -> list[str]:
        """Returns the models for which tenants or classes compete no longer."""
        ended = [model for model, until in self._contended_until.items() if until <= now]
        for model in ended:
            del self._contended_until[model]
        if ended and not self._contended_until:
            self._blocks.forget()
        return ended if self._classes is None else [*ended, *self._classes.end_contention(queues, now)]

    def preemptions(self, queues: WaitingQueues, now: float) -> list[Preemption]:
        """Returns the requests that have to leave now: for a more urgent class, and otherwise at most one tenant's
        sequences on each shard. The caller removes them at once."""
        if now < self._check_at:
            return []
        assert self._settings is not None
        before = now - self._settings.preempt_after_seconds
        able = [shard for shard in self._fleet.shards.values() if not shard.is_draining and not shard.is_suspected]
        for shard in able:
            # Otherwise one that has all its tokens could be chosen: its shard is about to say that it has ended.
            shard.fast_path.write_back()
        shared = [shard for shard in able if len(shard.num_by_tenant) > 1]
        crowded = [shard for shard in shared if len(shard.attempts) > self._num_places(shard)]
        for_classes = [] if self._classes is None else self._for_classes(self._classes, queues, able, before, now)
        taken = {preemption.shard.shard_id for preemption in for_classes}
        able = [shard for shard in able if shard.shard_id not in taken]
        crowded = [shard for shard in crowded if shard.shard_id not in taken]
        found: dict[str, Preemption] = {}
        for tenant, shards, num_wanted in self._starved(queues, before, crowded):
            free = [shard for shard in shards if shard.shard_id not in found and shard.shard_id not in taken]
            preemption = self._for(tenant, free, num_wanted)
            if preemption is not None:
                found[preemption.shard.shard_id] = preemption
        self._end_leaving()
        for shard in able:
            if len(shard.num_by_tenant) > 1 or shard.description.model in self._contended_until:
                preemption = None if shard.shard_id in found else self._for_blocks(shard, before)
                if preemption is not None:
                    found[shard.shard_id] = preemption
        for preemption in found.values():
            self._contended_until[preemption.shard.description.model] = now + self._settings.contention_seconds
        may_continue = (
            crowded
            or queues.num_requests
            or self._contended_until
            or any(map(self._blocks.has_queued, shared if self._classes is None else able))
        )
        self._check_at = now + self._settings.preempt_after_seconds if may_continue else math.inf
        return [*for_classes, *found.values()]

    def _for_classes(
        self, classes: ClassShares, queues: WaitingQueues, able: list[Shard], before: float, now: float
    ) -> list[Preemption]:
        """The sequences that make room for more urgent classes: on shards where some wait for a place, and if all are
        full for those that wait in the router. A request that a shard has free places for waits for something else."""
        assert self._settings is not None
        chosen: dict[str, tuple[PriorityClass, list[Choice]]] = {}
        for shard in able:
            waiting = classes.starved_on(shard, before)
            num_excess = len(shard.choices) - self._num_places(shard)
            if waiting is not None and num_excess > 0:
                chosen[shard.shard_id] = waiting, self._giving_way(classes, shard, waiting, num_excess, now)
        for live, num_wanted in classes.starved(queues, before):
            window, num_left = live.min_window, num_wanted
            shards = [
                shard
                for shard in able
                if shard.description.model == live.request.model and shard.description.max_model_len >= window
            ]
            if any(len(shard.attempts) < self._num_places(shard) for shard in shards):
                continue
            for shard in shards:
                if num_left > 0 and not (shard.shard_id in chosen and chosen[shard.shard_id][1]):
                    num_excess = len(shard.choices) - (self._num_places(shard) - num_left)
                    gone = self._giving_way(classes, shard, live.priority_class, num_excess, now)
                    chosen[shard.shard_id] = live.priority_class, gone
                    num_left -= len(gone)
        found: list[Preemption] = []
        for shard_id, (wanted_class, gone) in chosen.items():
            shard = self._fleet.shards[shard_id]
            by_tenant: dict[str, list[Choice]] = {}
            for choice in gone:
                by_tenant.setdefault(choice.request.request.tenant, []).append(choice)
            found += [Preemption(shard, tenant, left, is_for_class=True) for tenant, left in by_tenant.items()]
            if gone:
                until = now + self._settings.contention_seconds
                classes.note_preempted(shard.description.model, wanted_class, until)
        return found

    def _giving_way(
        self, classes: ClassShares, shard: Shard, wanted_class: PriorityClass, num_excess: int, now: float
    ) -> list[Choice]:
        able = filter(_may_move, classes.candidates(shard, wanted_class.rank, now))
        return list(itertools.islice(able, max(0, num_excess)))

    def _starved(
        self, queues: WaitingQueues, before: float, crowded: list[Shard]
    ) -> Iterator[tuple[str, list[Shard], int]]:
        """Tenants whose oldest request has waited since `before`, in the router or on a shard: with the shards where
        it could run, and the number of places that it needs besides those it has."""
        seen: set[tuple[str, str]] = set()
        for live in queues:
            model, tenant = live.request.model, live.request.tenant
            is_parked = live.queue_id is not None and live.queue_id.is_parked
            if live.num_attempts or is_parked or live.arrived_at > before or (model, tenant) in seen:
                continue
            if live.request.tier is SHADOW_TIER:
                continue
            seen.add((model, tenant))
            window = live.min_window
            shards = [
                shard
                for shard in self._fleet.ready(model)
                if not shard.is_suspected and shard.description.max_model_len >= window
            ]
            yield tenant, shards, len(live.pending)
        for shard in crowded:
            for tenant in _waiting_tenants(shard, before):
                yield tenant, [shard], 0

    def _for(self, tenant: str, shards: list[Shard], num_wanted: int) -> Preemption | None:
        """The sequences that make room for the tenant, on the shard where it costs the others least."""
        largest: tuple[int, str, Shard] | None = None
        for shard in shards:
            for other, count in shard.num_by_tenant.items():
                if other != tenant and (largest is None or count > largest[0]):
                    largest = (count, other, shard)
        if largest is None:
            return None
        _, other, shard = largest
        num_places = self._num_places(shard)
        num_left = _equal_part(num_places, shard, tenant)
        mine = shard.num_by_tenant.get(tenant, 0)
        running = [choice for choice in shard.choices.values() if choice.request.request.tenant == other]
        # A clear difference, so that two tenants with like demands do not take each other's places in turns.
        if len(running) <= num_left or len(running) < 2 * (mine + num_wanted):
            return None
        num_excess = len(shard.choices) - (num_places - num_wanted)
        able = sorted(filter(_may_move, reversed(running)), key=_cost_to_move)
        chosen = able[: max(0, min(num_excess, len(running) - num_left))]
        return Preemption(shard, other, chosen) if chosen else None

    def _for_blocks(self, shard: Shard, before: float) -> Preemption | None:
        """The sequences that give back the shard's reserve of blocks. They leave when half of it is gone, so that the
        next token of a running answer does not preempt another one; or at once, if a sequence waits for blocks."""
        num_free, num_reserved = self._blocks.num_free(shard), self._num_reserved_blocks(shard)
        if num_free >= num_reserved or shard.shard_id in self._leaving:
            return None
        held = self._blocks.held(shard)
        if not held:
            return None
        largest = max(held, key=lambda tenant: held[tenant])
        if 2 * num_free >= num_reserved and not _waiting_tenants(shard, before).keys() - {largest}:
            return None
        num_held, num_left = held[largest], self._block_share(shard, largest)
        num_others = max((count for tenant, count in held.items() if tenant != largest), default=0)
        if num_held < 2 * num_others:  # as for places: like tenants do not take each other's in turns
            return None
        running = [choice for choice in shard.choices.values() if choice.request.request.tenant == largest]
        chosen: list[Choice] = []
        for choice in sorted(filter(_may_move, reversed(running)), key=_cost_to_move):
            if num_free >= num_reserved or num_held <= num_left:
                break
            chosen.append(choice)
            num_free += num_blocks_of(choice, shard)
            num_held -= num_blocks_of(choice, shard)
        if not chosen:
            return None
        attempts = [(choice.shard_slot, shard.attempts[choice.shard_slot]) for choice in chosen]
        self._leaving[shard.shard_id] = _Leaving(self._blocks.report(shard), attempts)
        return Preemption(shard, largest, chosen)

    def _end_leaving(self) -> None:
        """Forget the sequences that have left, once their shard has reported what is free since."""
        for shard_id, leaving in list(self._leaving.items()):
            shard = self._fleet.shards.get(shard_id)
            if shard is None or (
                self._blocks.report(shard) is not leaving.report
                and all(shard.attempts.get(slot) is not attempt for slot, attempt in leaving.attempts)
            ):
                del self._leaving[shard_id]


def _waiting_tenants(shard: Shard, before: float) -> dict[str, None]:
    """Tenants with a sequence there that was sent at `before` or earlier and has not started, in their order."""
    return {
        choice.request.request.tenant: None
        for slot, choice in shard.choices.items()
        if choice.num_cached_tokens is None
        and shard.attempts[slot].sent_at <= before
        and shard.attempts[slot].tenant is not None
    }


def _equal_part(num_in_all: int, shard: Shard, tenant: str) -> int:
    """For each tenant on the shard, this one included, and for one more if there is none."""
    num_tenants = len(shard.num_by_tenant) + (tenant not in shard.num_by_tenant)
    return max(1, num_in_all // max(2, num_tenants))


def _may_move(choice: Choice) -> bool:
    return choice.num_moves < MAX_MOVES and not choice.is_at_limit


def _cost_to_move(choice: Choice) -> tuple[bool, float]:
    """Those that have not started first, then the youngest: they have least to compute again."""
    live: LiveRequest = choice.request
    return choice.num_cached_tokens is not None, -live.arrived_at
