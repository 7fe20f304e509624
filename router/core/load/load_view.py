"""The work of one shard, as far as this router knows now.

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
from router.core.load.decode_speed import DEFAULT_TPOT_SECONDS, DecodeSpeed, shared_tokens
from router.core.load.kv_memory import num_common, pressure_seconds, wait_seconds
from router.core.load.speed_model import PrefillWork, SpeedModel

ReservationKey = tuple[str, int]
"""(request_id, attempt_id): the reservation of one dispatch can only be released by the same dispatch."""

RATE_SECONDS: Final = 60.0
"""Time constant of the moving averages of arrivals and of work."""
MAX_PREFILL_SHARE: Final = 0.9
"""The largest share of a shard's time that prefill is taken to have: with a larger one, how long decoding takes beside
it could not be told."""
MIN_OBSERVATIONS: Final = 8
"""Steps with first tokens from which a shard's speed counts as known."""
TRUST_SECONDS: Final = 30.0
"""How long it does so after the last first token, while the shard prefills nothing."""


class Reservation(msgspec.Struct, frozen=True):
    """The load that one dispatch reserves on its shard until it ends there."""

    shard_id: str
    num_sequences: int
    num_prefill_tokens: int
    """Tokens that the shard will have to compute, according to the index."""
    num_cached_tokens: int
    num_new_blocks: int
    """Blocks that have to be free for the sequences, beyond those that are in use there already."""
    placed_at: float
    is_prefill_chunk: bool = False
    """True for a chunk of a prompt whose request is still to come."""
    is_arrival: bool = True
    """True for the first reservation of its request on that shard."""
    class_rank: int = INTERACTIVE_RANK
    num_expected_tokens: int = 0
    """The output that is expected of all sequences together."""
    block_hashes: Sequence[int] = ()
    """The hashes of the prompt's full blocks."""
    is_copy: bool = False
    """True for a copy of a prefix, for requests that come later."""

    @property
    def work(self) -> PrefillWork:
        return PrefillWork.of(self.num_prefill_tokens, self.num_cached_tokens)

    @property
    def num_context_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_cached_tokens


class QueuedPlacement(NamedTuple):
    """A request that waits in the router for a shard."""

    own_seconds: float
    """Its own prefill time."""
    class_rank: int
    tenant: str
    num_context_tokens: int = 0
    num_needed_blocks: int = 0
    """KV blocks that have to be free for it."""


class QueuedPlacements(dict[str, QueuedPlacement]):
    """The requests that wait in the router for one shard, by request_id, with their sums. These are computed again only
    after a change: each placement asks for them on each shard. Only the methods below change it."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        super().__init__()
        self._sums: tuple[list[float], float, int, int] | None = None

    def __setitem__(self, request_id: str, held: QueuedPlacement) -> None:
        self._sums = None
        super().__setitem__(request_id, held)

    def pop(self, request_id: str) -> QueuedPlacement:  # pyrefly: ignore[bad-override]
        self._sums = None
        return super().pop(request_id)

    def _sum_up(self) -> tuple[list[float], float, int, int]:
        seconds = [one.own_seconds for one in self.values()]
        num_blocks = sum(one.num_needed_blocks for one in self.values())
        self._sums = seconds, sum(seconds), num_blocks, sum(one.num_context_tokens for one in self.values())
        return self._sums

    @property
    def own_seconds(self) -> list[float]:
        """The own prefill time of each. It is not changed later."""
        return (self._sums or self._sum_up())[0]

    @property
    def seconds(self) -> float:
        """Their own prefill time together."""
        return (self._sums or self._sum_up())[1]

    @property
    def num_blocks(self) -> int:
        """KV blocks that have to be free for them."""
        return (self._sums or self._sum_up())[2]

    @property
    def num_context_tokens(self) -> int:
        return (self._sums or self._sum_up())[3]


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
        "_queue",
        "_queue_as_of",
        "bound_arrivals",
        "busy",
        "context_change",
        "decode_factor",
        "decode_speed",
        "fleet_speed",
        "foreign_context_tokens",
        "foreign_queued_tokens",
        "foreign_running",
        "foreign_waiting",
        "freed_blocks",
        "growth_tokens",
        "held",
        "is_mixed",
        "learned_from",
        "model",
        "num_blocks",
        "num_queued_cached_tokens",
        "own_context_tokens",
        "own_expected_tokens",
        "own_new_blocks",
        "own_running",
        "own_waiting",
        "queued",
        "queued_work",
        "ranked_sequences",
        "ranked_work",
        "report",
        "running",
        "speed",
        "started_at",
        "yield_tokens",
    )

    def __init__(
        self,
        model: str,
        num_blocks: int,
        fleet_speed: SpeedModel,
        decode_speed: DecodeSpeed,
        yield_tokens: int = 0,
        growth_tokens: int = 0,
    ) -> None:
        self.model = model
        self.yield_tokens = yield_tokens
        """After how many tokens prefill gives way to that of more urgent classes; 0: it never does."""
        self.num_blocks = num_blocks
        self.growth_tokens = growth_tokens
        """For how many tokens of output a sequence takes another block; 0: it has them reserved from the beginning."""
        self.report = ShardLoad(num_available_blocks=num_blocks)
        self.fleet_speed = fleet_speed
        self.speed = SpeedModel(fleet_speed)
        self.queued: dict[ReservationKey, Reservation] = {}
        """Own attempts without a first token, in the order of placement."""
        self.queued_work = PrefillWork()
        self._queue = (0.0, 0.0)
        """How long the prefill of `queued_work` takes, and that of the first of it."""
        self._queue_as_of: tuple[object, ...] = ()
        """The values from which `_queue` was computed: placements ask for it far more often than it changes."""
        self.num_queued_cached_tokens = 0
        """Prompt tokens of queued attempts that are cached there."""
        self.ranked_work: dict[int, PrefillWork] = {}
        """The part of it of each class rank other than that of interactive requests; ranks without work are absent."""
        self.ranked_sequences: dict[int, int] = {}
        """Own sequences of each such rank, waiting or running."""
        self.is_mixed = False
        """True when prefill of several ranks was queued at a time since the queue was last empty. It may have been
        interrupted then, so that its duration says nothing about the speed."""
        self.bound_arrivals = Rate()
        """Own attempts placed there, each weighted by its share of cached tokens: those that had to come here."""
        self.busy = Rate()
        """Their prefill time: the share of its time that the shard is busy with them."""
        self.held = QueuedPlacements()
        self.running: dict[ReservationKey, Reservation] = {}
        """Own attempts with a first token."""
        self.own_waiting = 0
        self.own_running = 0
        self.own_context_tokens = 0
        """Context of own running sequences, as of their first tokens."""
        self.own_expected_tokens = 0
        self.own_new_blocks = 0
        """Both of all own sequences, waiting or running."""
        self.freed_blocks = 0
        """The blocks that sequences have freed which ended since the last report."""
        self.context_change = 0
        """By how many tokens the context of decoding sequences has changed since then."""
        self.decode_speed = decode_speed
        self.decode_factor = 1.0
        """How many times longer its decode steps take than those of the model's other shards."""
        self.foreign_waiting = 0
        self.foreign_running = 0
        self.foreign_queued_tokens = 0
        self.foreign_context_tokens = 0
        self.started_at = 0.0
        """When an own sequence last produced its first token."""
        self.learned_from = -math.inf
        """When the prefill began from which speeds were last learned."""

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
    def num_free_blocks(self) -> int:
        """Blocks that are free or merely cached, and that no sequence on its way there needs. Negative: some have to
        wait."""
        return self.report.num_available_blocks + self.freed_blocks - self.num_unadmitted_blocks

    @property
    def num_unadmitted_blocks(self) -> int:
        """New blocks of own sequences that the engine had not admitted when it last reported: the newest ones, since it
        admits them in order."""
        num_blocks = 0
        if self.queued:
            num_not_admitted = self.own_waiting - max(0, self.report.num_own_running - self.own_running)
            for reservation in reversed(self.queued.values()):
                if num_not_admitted <= 0:
                    break
                num_not_admitted -= reservation.num_sequences
                num_blocks += reservation.num_new_blocks
        return num_blocks

    @property
    def is_idle(self) -> bool:
        """True if the shard has nothing to do, and no request waits in the router for it."""
        if self.own_running or self.own_waiting or self.held:
            return False
        return not (self.foreign_running or self.foreign_waiting)

    def can_hold(self, num_needed_blocks: int) -> bool:
        """Returns true if so many blocks are free. A shard that runs nothing takes whatever it is sent, or says why
        not."""
        return not (self.num_running or self.num_waiting) or num_needed_blocks <= self.num_free_blocks

    def num_in_use(self, block_hashes: Sequence[int], limit: int) -> int:
        """How many of the first `limit` blocks own running sequences hold: those need no room."""
        limit = min(limit, len(block_hashes))
        num_found, last = 0, limit - 1
        for reservation in self.running.values():
            hashes = reservation.block_hashes
            if len(hashes) > last >= 0 and hashes[last] == block_hashes[last]:  # the blocks before are the same, too
                return limit
            num_found = num_common(block_hashes, hashes, num_found)
        return num_found

    def num_sharing(self, block_hashes: Sequence[int], num_blocks: int) -> int:
        """How many own running attempts have these first blocks."""
        last = num_blocks - 1
        return sum(
            len(one.block_hashes) > last and one.block_hashes[last] == block_hashes[last]
            for one in self.running.values()
        )

    @property
    def blocks_each(self) -> float:
        """How many blocks an own sequence frees when it ends."""
        num_sequences = self.own_running + self.own_waiting
        if not num_sequences:
            return 1.0
        num_grown = self.own_expected_tokens / self.growth_tokens if self.growth_tokens else 0.0
        return max(1.0, (self.own_new_blocks + num_grown) / num_sequences)

    @property
    def expected_tokens_each(self) -> float:
        if not self.own_expected_tokens:
            return 0.0
        return self.own_expected_tokens / (self.own_running + self.own_waiting)

    @property
    def num_decoding_tokens(self) -> int:
        """The context of all sequences that decode there, with what they have generated."""
        return max(0, self.report.num_decode_context_tokens + self.context_change)

    @property
    def step_seconds(self) -> float:
        """The duration of a decode step; 0: not known."""
        expected = self.decode_speed.step_seconds(self.num_decoding_tokens) * self.decode_factor
        return max(self.report.decode_step_seconds, expected)

    def decode_share(self, now: float) -> float:
        """The share of the shard's time that prefill leaves to decoding."""
        return 1 - min(self.busy.per_second(now), MAX_PREFILL_SHARE)

    def residual_seconds(self, now: float) -> float:
        """How long a running sequence still takes, on average."""
        if not self.own_expected_tokens:
            return 0.0
        return self.expected_tokens_each * self.step_seconds / self.decode_share(now)

    def memory_seconds(
        self, num_needed_blocks: int, num_later_blocks: int, num_free_blocks: int, now: float
    ) -> tuple[float, float]:
        """(time until blocks for one more request are free, what taking `num_later_blocks`, with the output that comes,
        costs requests that come later). `num_free_blocks`: those that nothing needs which waits for the shard."""
        residual = self.residual_seconds(now)
        if not residual:
            return 0.0, 0.0
        wait, blocks_each, num_running = 0.0, self.blocks_each, self.num_running
        if num_needed_blocks > num_free_blocks:
            wait = wait_seconds(num_needed_blocks - num_free_blocks, blocks_each, max(1, num_running), residual)
        num_sequences = num_running + self.num_waiting + len(self.held)
        return wait, pressure_seconds(num_later_blocks, num_free_blocks, blocks_each, num_sequences, residual)

    def decode_delay_seconds(
        self, num_context_tokens: int, num_expected_tokens: int, now: float, tpot_seconds: float = DEFAULT_TPOT_SECONDS
    ) -> float:
        """By how much decoding takes longer if a sequence of this context comes: that of the others for its context,
        and its own for theirs. Weighted by the share of the slack before the objective `tpot_seconds` that the context
        there then uses: a longer step hardly matters far below the objective, and answers miss it close to it. Prefill
        takes its share of the time between two tokens."""
        speed = self.decode_speed
        if not speed.seconds_per_token:
            return 0.0
        num_sequences = self.num_running + self.num_waiting + len(self.held)
        num_there = self.num_decoding_tokens + self.held.num_context_tokens
        num_there += self.queued_work.num_tokens + self.num_queued_cached_tokens
        shared = shared_tokens(num_expected_tokens, self.expected_tokens_each)
        per_token = speed.seconds_per_token * self.decode_factor
        step_seconds = tpot_seconds * self.decode_share(now)
        per_token *= speed.used_slack(num_there + num_context_tokens, self.decode_factor, step_seconds)
        return per_token * (num_context_tokens * num_sequences * shared + num_expected_tokens * num_there)

    def has_shown_speed(self, now: float) -> bool:
        """True when its predictions rest on enough of its own first tokens, and a recent one: a shard to which nothing
        is sent because it was slow once must not be taken for slow for ever."""
        if self.speed.num_observations < MIN_OBSERVATIONS:
            return False
        return bool(self.queued) or now - self.started_at <= TRUST_SECONDS

    def queue_seconds(self, now: float) -> float:
        """Time until the prefill queued there is done, less what must have been done since the last first token (never
        more than the first in the queue needs, since its first token has not come)."""
        if not (self.queued or self.foreign_queued_tokens):
            return 0.0
        num_context_tokens = self.own_context_tokens + self.foreign_context_tokens
        known = self.speed.known
        if not self.queued:
            return self.foreign_queued_tokens * known[1]
        work = self.queued_work
        first = next(iter(self.queued.values()))
        if self._queue_as_of != (work, first, known, num_context_tokens):
            self._queue_as_of = (work, first, known, num_context_tokens)
            first_seconds = self.speed.request_seconds(
                first.num_prefill_tokens, first.num_cached_tokens, num_context_tokens
            )
            self._queue = self.speed.seconds(work, num_context_tokens), first_seconds
        seconds, first_seconds = self._queue
        if self.foreign_queued_tokens:
            seconds += self.foreign_queued_tokens * known[1]
        elapsed = now - (self.started_at if self.started_at > first.placed_at else first.placed_at)
        if elapsed > 0.0:
            seconds -= elapsed if elapsed < first_seconds else first_seconds
        return seconds if seconds > 0.0 else 0.0

    def yielding(self, class_rank: int, now: float) -> tuple[float, int]:
        """Returns the part of `queue_seconds` and of the queued tokens for which a request of that rank does not wait:
        prefill of less urgent ones, beyond the step that is under way. Other routers' prefill is of unknown classes and
        never counts."""
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
