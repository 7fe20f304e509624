"""The work of each shard, as far as this router knows now.

There are two sources: requests that this router has placed, known token by token and never stale; and requests of other
routers, which are the shard's report less this router's own share of it. So with one router the age of the reports
hardly matters, and with several each sees the others' work as of the last report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from kvloom_common.class_rank import INTERACTIVE_RANK
from router.core.events import ShardLoad
from router.core.load.speed_model import PrefillWork, SpeedModel

ReservationKey = tuple[str, int]
"""(request_id, attempt_id): the reservation of one dispatch can only be released by the same dispatch."""

RESIDENCE_SMOOTHING: Final = 0.05
"""Weight of a sequence in the moving average of how long sequences withheld their blocks."""
RATE_SECONDS: Final = 60.0
"""Time constant of the moving averages of arrivals and of work."""
SHARING_SMOOTHING: Final = 0.2
"""Weight of a new report in the moving average of how much KV sequences share."""


MIN_OBSERVATIONS: Final = 8
"""Steps with first tokens from which a shard's speed counts as known."""
TRUST_SECONDS: Final = 30.0
"""How long it does so after the last first token, while the shard prefills nothing."""


class Reservation(msgspec.Struct, frozen=True):
    """What one dispatch reserves on its shard until it ends there."""

    shard_id: str
    num_sequences: int
    num_prefill_tokens: int
    """Tokens that the shard will have to compute, according to the index."""
    num_cached_tokens: int
    num_blocks: int
    """Blocks that the sequences will withheld, shared ones included."""
    placed_at: float
    is_prefill_chunk: bool = False
    """Whether this is a chunk of a prompt whose request is still to come."""
    is_arrival: bool = True
    """Whether this is the first for its request on that shard."""
    class_rank: int = INTERACTIVE_RANK

    @property
    def work(self) -> PrefillWork:
        return PrefillWork.of(self.num_prefill_tokens, self.num_cached_tokens)

    @property
    def num_context_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_cached_tokens


class HeldRequest(NamedTuple):
    """A request that waits in the router for a shard."""

    own_seconds: float
    """Its own prefill time."""
    class_rank: int
    tenant: str


class Rate:
    """Arrivals per second, over about the last minutes."""

    __slots__ = ("_at", "_sum")

    def __init__(self) -> None:
        self._at = 0.0
        self._sum = 0.0

    def add(self, amount: float, now: float) -> None:
        self._sum = self._sum * math.exp((self._at - now) / RATE_SECONDS) + amount
        self._at = now

    def per_second(self, now: float) -> float:
        return self._sum * math.exp((self._at - now) / RATE_SECONDS) / RATE_SECONDS if self._sum else 0.0


class LoadView:
    """The load of one shard. `own_*` is this router's, `foreign_*` other routers'."""

    __slots__ = (
        "bound_arrivals",
        "busy",
        "fleet_speed",
        "foreign_context_tokens",
        "foreign_queued_tokens",
        "foreign_running",
        "foreign_waiting",
        "held",
        "is_mixed",
        "model",
        "num_blocks",
        "own_blocks",
        "own_context_tokens",
        "own_running",
        "own_waiting",
        "queued",
        "queued_work",
        "ranked_sequences",
        "ranked_work",
        "report",
        "residence_seconds",
        "running",
        "sharing",
        "speed",
        "started_at",
        "yield_tokens",
    )

    def __init__(self, model: str, num_blocks: int, fleet_speed: SpeedModel, yield_tokens: int = 0) -> None:
        self.model = model
        self.yield_tokens = yield_tokens
        """After how many tokens prefill gives way to that of more urgent classes; 0: it never does."""
        self.num_blocks = num_blocks
        self.report = ShardLoad(num_available_blocks=num_blocks)
        self.fleet_speed = fleet_speed
        self.speed = SpeedModel(fleet_speed)
        self.queued: dict[ReservationKey, Reservation] = {}
        """Own attempts without a first token, in the order of placement."""
        self.queued_work = PrefillWork()
        self.ranked_work: dict[int, PrefillWork] = {}
        """The part of it of each class rank other than that of interactive requests; ranks without work are absent."""
        self.ranked_sequences: dict[int, int] = {}
        """Own sequences of each such rank, waiting or running."""
        self.is_mixed = False
        """Whether prefill of several ranks was queued at a time since the queue was last empty. It may have been
        interrupted then, so that its duration says nothing about the speed."""
        self.bound_arrivals = Rate()
        """Own attempts placed there, each weighted by its share of cached tokens: those that had to come here."""
        self.busy = Rate()
        """Their prefill time: the share of its time that the shard is busy with them."""
        self.held: dict[str, HeldRequest] = {}
        """By request_id: the requests that wait in the router for this shard."""
        self.running: dict[ReservationKey, float] = {}
        """Own attempts with a first token → when it came."""
        self.residence_seconds = 0.0
        """Moving average of the time from first token to end."""
        self.own_waiting = 0
        self.own_running = 0
        self.own_context_tokens = 0
        """Context of own running sequences, as of their first tokens."""
        self.own_blocks = 0
        self.foreign_waiting = 0
        self.foreign_running = 0
        self.foreign_queued_tokens = 0
        self.foreign_context_tokens = 0
        self.started_at = 0.0
        """When an own sequence last produced its first token."""
        self.sharing = 1.0
        """Blocks in use as the shard counts them / as summed over own sequences: below 1 where they share prefixes,
        above where other routers' sequences run."""

    @property
    def num_waiting(self) -> int:
        return self.own_waiting + self.foreign_waiting

    @property
    def num_running(self) -> int:
        return self.own_running + self.foreign_running

    @property
    def num_queued_prefill_tokens(self) -> int:
        return self.queued_work.num_tokens + self.foreign_queued_tokens

    @property
    def num_context_tokens(self) -> int:
        """Context tokens of decoding sequences."""
        return self.own_context_tokens + self.foreign_context_tokens

    @property
    def num_used_blocks(self) -> float:
        """Blocks that running and waiting sequences withheld or will withheld."""
        if self.own_blocks:
            return self.own_blocks * self.sharing
        return float(self.num_blocks - self.report.num_available_blocks) if self.foreign_running else 0.0

    def memory_wait_seconds(self, num_new_blocks: int) -> float:
        """Time until blocks for one more request are free, if sequences end as they usually do. Blocks that are merely
        cached are free."""
        used = self.num_used_blocks
        excess = used + num_new_blocks - self.num_blocks
        return 0.0 if excess <= 0 or not used else self.residence_seconds * min(excess / used, 1.0)

    @property
    def num_unadmitted_blocks(self) -> int:
        """Blocks of own sequences that the engine had not admitted when it last reported: the newest ones, since it
        admits them in order."""
        num_blocks = 0
        if self.queued:
            num_not_admitted = self.own_waiting - max(0, self.report.num_own_running - self.own_running)
            for reservation in reversed(self.queued.values()):
                if num_not_admitted <= 0:
                    break
                num_not_admitted -= reservation.num_sequences
                num_blocks += reservation.num_blocks
        return num_blocks

    def learn_sharing(self) -> None:
        """Compare the blocks that the shard reports in use with those of the own sequences that it has admitted."""
        num_blocks = self.own_blocks - self.num_unadmitted_blocks
        if num_blocks > 0:
            used = self.num_blocks - self.report.num_available_blocks
            self.sharing += SHARING_SMOOTHING * (max(0, used) / num_blocks - self.sharing)

    def has_shown_speed(self, now: float) -> bool:
        """Whether its predictions rest on enough of its own first tokens, and a recent one: a shard to which nothing is
        sent because it was slow once must not be taken for slow for ever."""
        if self.speed.num_observations < MIN_OBSERVATIONS:
            return False
        return bool(self.queued) or now - self.started_at <= TRUST_SECONDS

    def queue_seconds(self, now: float) -> float:
        """Time until the prefill queued there is done, less what must have been done since the last first token (never
        more than the first in the queue needs, since its first token has not come)."""
        if not (self.queued or self.foreign_queued_tokens):
            return 0.0
        num_context_tokens = self.num_context_tokens
        seconds = self.foreign_queued_tokens * self.speed.seconds_per_token
        if self.queued:
            seconds += self.speed.seconds(self.queued_work, num_context_tokens)
            first = next(iter(self.queued.values()))
            elapsed = now - max(self.started_at, first.placed_at)
            seconds -= min(max(elapsed, 0.0), self.speed.seconds(first.work, num_context_tokens))
        return max(seconds, 0.0)

    @property
    def held_seconds(self) -> float:
        """Own prefill time of all requests that wait in the router for this shard."""
        return sum(one.own_seconds for one in self.held.values())

    def yielding(self, class_rank: int, now: float) -> tuple[float, int]:
        """What of `queue_seconds` and of the queued tokens a request of that rank does not wait for: prefill of less
        urgent ones, beyond the step that is under way. Other routers' prefill is of unknown classes and never counts.
        """
        if not (self.ranked_work and self.yield_tokens):
            return 0.0, 0
        work = PrefillWork()
        for rank, part in self.ranked_work.items():
            if rank > class_rank:
                work += part
        if class_rank < INTERACTIVE_RANK:
            work += self._unranked_work()
        if not work.num_requests:
            return 0.0, 0
        num_context_tokens = self.num_context_tokens
        seconds = self.speed.seconds(work, num_context_tokens)
        first = next(iter(self.queued.values()))
        if first.class_rank > class_rank:  # as in `queue_seconds`
            elapsed = now - max(self.started_at, first.placed_at)
            seconds -= min(max(elapsed, 0.0), self.speed.seconds(first.work, num_context_tokens))
        num_tokens = work.num_tokens - min(work.num_tokens, self.yield_tokens)
        return max(seconds - self.speed.seconds_per_token * self.yield_tokens, 0.0), num_tokens

    def num_urgent_sequences(self, class_rank: int) -> int:
        """Own sequences of classes more urgent than that rank."""
        num_ranked = sum(self.ranked_sequences.values())
        num_urgent = sum(count for rank, count in self.ranked_sequences.items() if rank < class_rank)
        return num_urgent + (self.own_running + self.own_waiting - num_ranked if class_rank > INTERACTIVE_RANK else 0)

    def note_queued(self, reservation: Reservation) -> None:
        """An attempt was sent, and there are several classes; its work is in `queued_work`."""
        rank = reservation.class_rank
        if rank != INTERACTIVE_RANK:
            self.ranked_work[rank] = self.ranked_work.get(rank, PrefillWork()) + reservation.work
            self.count_ranked(rank, reservation.num_sequences)
        self.is_mixed |= len(self.ranked_work) + (self._unranked_work().num_requests > 0) > 1

    def note_dequeued(self, reservation: Reservation) -> None:
        """An attempt of another class than interactive has its first token, or has ended without one."""
        rank = reservation.class_rank
        self.ranked_work[rank] -= reservation.work
        if not self.ranked_work[rank].num_requests:
            del self.ranked_work[rank]

    def count_ranked(self, class_rank: int, num_sequences: int) -> None:
        """Sequences of that rank have come; if the number is negative, they have gone."""
        count = self.ranked_sequences.get(class_rank, 0) + num_sequences
        if count:
            self.ranked_sequences[class_rank] = count
        else:
            del self.ranked_sequences[class_rank]

    def _unranked_work(self) -> PrefillWork:
        """The queued work of interactive requests."""
        work = self.queued_work
        for part in self.ranked_work.values():
            work -= part
        return work


class LoadLedger:
    """The reservations and views of all shards. A reservation is made by a dispatch and released exactly once; a
    KeyError shows that a caller broke that."""

    def __init__(self) -> None:
        self._views: dict[str, LoadView] = {}
        self._reservations: dict[ReservationKey, Reservation] = {}
        self._fleet_speeds: dict[str, SpeedModel] = {}
        """By model. A model's is forgotten with its last shard: names come and go without end."""

    def add_shard(self, shard_id: str, model: str, num_blocks: int, yield_tokens: int = 0) -> None:
        """`yield_tokens`: see ShardDescription."""
        assert shard_id not in self._views
        fleet_speed = self._fleet_speeds.get(model)
        if fleet_speed is None:
            fleet_speed = self._fleet_speeds[model] = SpeedModel()
        self._views[shard_id] = LoadView(model, num_blocks, fleet_speed, yield_tokens)

    def remove_shard(self, shard_id: str) -> None:
        """All reservations of the shard must have been released."""
        view = self._views.pop(shard_id)
        assert not view.own_running
        assert not view.own_waiting
        if all(other.model != view.model for other in self._views.values()):
            del self._fleet_speeds[view.model]

    def view(self, shard_id: str) -> LoadView:
        return self._views[shard_id]

    def report(self, shard_id: str, load: ShardLoad) -> None:
        """Record a shard's load report."""
        view = self._views[shard_id]
        view.report = load
        view.foreign_waiting = max(0, load.num_waiting - load.num_own_waiting)
        view.foreign_running = max(0, load.num_running - load.num_own_running)
        view.foreign_queued_tokens = max(0, load.num_queued_prefill_tokens - load.num_own_queued_prefill_tokens)
        view.foreign_context_tokens = max(0, load.num_decode_context_tokens - load.num_own_decode_context_tokens)
        view.speed.set_reported_rate(load.prefill_tokens_per_second)
        view.learn_sharing()

    def reservation(self, key: ReservationKey) -> Reservation:
        return self._reservations[key]

    def reserve(self, key: ReservationKey, reservation: Reservation) -> None:
        if key in self._reservations:
            raise KeyError(key)
        view = self._views[reservation.shard_id]
        self._reservations[key] = reservation
        view.queued[key] = reservation
        work = reservation.work
        view.queued_work += work
        if view.ranked_work or reservation.class_rank != INTERACTIVE_RANK:
            view.note_queued(reservation)
        if reservation.is_arrival:
            share = reservation.num_cached_tokens / reservation.num_context_tokens
            view.bound_arrivals.add(share, reservation.placed_at)
        view.busy.add(view.speed.seconds(work, view.num_context_tokens), reservation.placed_at)
        view.own_waiting += reservation.num_sequences
        view.own_blocks += reservation.num_blocks

    def note_starts(self, shard_id: str, starts: Sequence[tuple[ReservationKey, float]], now: float) -> None:
        """First tokens came in one step, with how long each waited in the engine's queue: none of these is queued any
        more. Their prefill took the time since the previous step with first tokens, or since the engine started the
        first of these; waiting for KV blocks is not part of it."""
        view = self._views[shard_id]
        work: PrefillWork | None = None
        began_at = now
        num_context_tokens = view.num_context_tokens
        for key, queue_time_seconds in starts:
            reservation = view.queued.pop(key, None)
            if reservation is None:
                continue
            if reservation.class_rank != INTERACTIVE_RANK:
                view.note_dequeued(reservation)
            work = reservation.work if work is None else work + reservation.work
            began_at = min(began_at, reservation.placed_at + queue_time_seconds)
            view.running[key] = now
            view.own_waiting -= reservation.num_sequences
            view.own_running += reservation.num_sequences
            view.own_context_tokens += reservation.num_context_tokens
        if work is None:
            return
        view.queued_work -= work
        if not (view.foreign_queued_tokens or view.is_mixed):
            seconds = now - max(view.started_at, began_at)
            view.speed.observe(work, num_context_tokens, seconds)
            view.fleet_speed.observe(work, num_context_tokens, seconds)
        view.started_at = now
        if not view.queued:
            view.is_mixed = False

    def release(self, key: ReservationKey, now: float) -> None:
        reservation = self._reservations.pop(key)
        view = self._views[reservation.shard_id]
        view.own_blocks -= reservation.num_blocks
        if reservation.class_rank != INTERACTIVE_RANK:
            view.count_ranked(reservation.class_rank, -reservation.num_sequences)
        if view.queued.pop(key, None) is not None:
            view.queued_work -= reservation.work
            if reservation.class_rank != INTERACTIVE_RANK:
                view.note_dequeued(reservation)
            view.own_waiting -= reservation.num_sequences
        else:
            seconds = now - view.running.pop(key)
            if not reservation.is_prefill_chunk:
                view.residence_seconds += RESIDENCE_SMOOTHING * (seconds - view.residence_seconds)
            view.own_running -= reservation.num_sequences
            view.own_context_tokens -= reservation.num_context_tokens

    @property
    def is_busy(self) -> bool:
        """Whether anything is reserved."""
        return bool(self._reservations)

    def keys(self) -> set[ReservationKey]:
        """The keys of all reservations."""
        return set(self._reservations)

    def check_integrity(self) -> None:
        """Assert that every sum is the sum of its parts, that nothing is negative, and that nothing is kept of models
        that have gone."""
        assert self._fleet_speeds.keys() == {view.model for view in self._views.values()}
        by_shard: dict[str, dict[ReservationKey, Reservation]] = {shard_id: {} for shard_id in self._views}
        for key, reservation in self._reservations.items():
            by_shard.setdefault(reservation.shard_id, {})[key] = reservation
        for shard_id, view in self._views.items():
            reserved = by_shard[shard_id]
            running = [r for key, r in reserved.items() if key not in view.queued]
            assert view.queued.items() <= reserved.items()
            assert view.running.keys() == reserved.keys() - view.queued.keys()
            assert view.own_waiting == sum(r.num_sequences for r in view.queued.values())
            assert view.own_running == sum(r.num_sequences for r in running)
            assert view.own_context_tokens == sum(r.num_context_tokens for r in running)
            assert view.own_blocks == sum(r.num_blocks for r in reserved.values())
            assert view.queued_work.num_requests == len(view.queued)
            assert view.queued_work.num_tokens == sum(r.num_prefill_tokens for r in view.queued.values())
            assert view.queued_work.num_pairs == sum(r.work.num_pairs for r in view.queued.values())
            ranks = {r.class_rank for r in view.queued.values()}
            assert view.ranked_work.keys() == ranks - {INTERACTIVE_RANK}
            for rank, work in view.ranked_work.items():
                own = [r.work for r in view.queued.values() if r.class_rank == rank]
                assert (work.num_requests, work.num_tokens) == (len(own), sum(one.num_tokens for one in own))
            assert view.is_mixed or len(ranks) < 2
            assert sum(view.ranked_sequences.values()) == sum(
                r.num_sequences for r in reserved.values() if r.class_rank != INTERACTIVE_RANK
            )
            assert min(view.num_waiting, view.num_running, view.num_queued_prefill_tokens) >= 0
