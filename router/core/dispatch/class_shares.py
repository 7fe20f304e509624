"""How classes share a shard: what is left to each (its floor), and who gives way to a more urgent class.

A class with a `reserved_share` has that part of each shard's batch and KV blocks to itself while it has work, and for a
moment after: others are not sent into it. A more urgent class whose requests had to wait gets places from less urgent
ones: the sequences leave their shard and continue later. From then on less urgent classes leave a part of the batch to
it, for as long as it comes. Waiting protects: a request that counts as urgent as the class that it would give way to
(PriorityClass.rank_after) keeps its place, and is kept from none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from router.core.dispatch.block_shares import BlockShares, num_blocks_needed, num_blocks_of
from router.core.dispatch.waiting_queues import WaitingQueues
from router.core.fleet.fleet import Fleet, Shard
from router.core.live import Choice, LiveRequest
from router.core.priority_classes import PriorityClass


class ClassShares:
    def __init__(
        self, classes: Sequence[PriorityClass], fleet: Fleet, blocks: BlockShares, work_seconds: float
    ) -> None:
        """`work_seconds`: how long a class is taken to have work after the last sign of it."""
        self._fleet = fleet
        self._blocks = blocks
        self._work_seconds = work_seconds
        self._reserving = {one.name: one for one in classes if one.reserved_share}
        self._has_work_until: dict[tuple[str, str], float] = {}
        """(model, class with a floor): until when it is taken to have work."""
        self._contended: dict[str, tuple[int, float]] = {}
        """Model → the most urgent rank that had to wait, and until when others leave a part of the batch to it."""
        self._now = 0.0

    # -- who may be sent -----------------------------------------------------------------------------------------

    @property
    def has_floors(self) -> bool:
        return bool(self._reserving)

    def begin_serving(self, now: float) -> None:
        self._now = now

    def note_work(self, live: LiveRequest, now: float) -> None:
        """A request waits, or was sent to a shard."""
        self._now = now
        name = live.priority_class.name
        if name in self._reserving:
            self._has_work_until[live.request.model, name] = now + self._work_seconds

    def must_leave_room(self, shard: Shard, live: LiveRequest, num_places: int, num_reserved: int) -> bool:
        """True when the rest of the shard is left to other classes. `num_reserved`: the places that less urgent classes
        leave to a more urgent one that had to wait."""
        model, own = shard.description.model, live.priority_class
        num_free = num_places - len(shard.attempts) - len(live.pending)
        contended = self._contended.get(model)
        if contended is not None and num_free < num_reserved and shard.attempts:
            waited_seconds = self._now - live.arrived_at
            if own.rank > contended[0] and own.rank_after(waited_seconds) > contended[0]:
                return True
        if not self._has_work_until or not shard.attempts:
            return False
        others = [
            one
            for one in self._reserving.values()
            if one.name != own.name and (model, one.name) in self._has_work_until
        ]
        if not others:
            return False
        held = _held(shard, {own.name, *(one.name for one in others)})
        if own.reserved_share and held[own.name][0] < int(own.reserved_share * num_places):
            return False  # these places are its own
        # Also a floor in use counts: what waits in the engine would take its places one by one.
        num_wanted = len(shard.attempts) + len(live.pending)
        floors = {one.name: max(1, int(one.reserved_share * num_places)) for one in others}
        if any(num_wanted - held[name][0] > num_places - floor for name, floor in floors.items()):
            return True
        if num_wanted - sum(held[name][0] for name in floors) > num_places - sum(floors.values()):
            return True
        num_blocks = shard.description.num_blocks
        floor = sum(int(one.reserved_share * num_blocks) for one in others)
        num_taken = num_blocks - self._blocks.num_free(shard) - sum(held[one.name][1] for one in others)
        return num_taken + num_blocks_needed(live, shard) > num_blocks - floor

    def next_deadline(self) -> float:
        """When `end_contention` has to be called at the latest; infinity: not before another event."""
        until = min((until for _, until in self._contended.values()), default=float("inf"))
        return min(until, min(self._has_work_until.values(), default=float("inf")))

    def end_contention(self, queues: WaitingQueues, now: float) -> set[str]:
        """Returns the models of which less is left free from now on."""
        ended = {model for model, (_, until) in self._contended.items() if until <= now}
        for model in ended:
            del self._contended[model]
        for model, name in [key for key, until in self._has_work_until.items() if until <= now]:
            if self._works(model, name, queues):
                self._has_work_until[model, name] = now + self._work_seconds
            else:
                del self._has_work_until[model, name]
                ended.add(model)
        return ended

    def _works(self, model: str, name: str, queues: WaitingQueues) -> bool:
        running = (choice.request for shard in self._fleet.ready(model) for choice in shard.choices.values())
        return any(live.priority_class.name == name for live in running) or any(
            live.priority_class.name == name and live.request.model == model for live in queues
        )

    # -- who has to give way -------------------------------------------------------------------------------------

    def starved(self, queues: WaitingQueues, before: float) -> list[tuple[LiveRequest, int]]:
        """For each model and class, the most urgent first: a request that has waited since `before`, and how many
        places such requests need."""
        oldest: dict[tuple[str, str], LiveRequest] = {}
        num_wanted: dict[tuple[str, str], int] = {}
        for live in queues:
            if live.num_attempts or live.arrived_at > before:
                continue
            key = (live.request.model, live.priority_class.name)
            oldest.setdefault(key, live)
            num_wanted[key] = num_wanted.get(key, 0) + len(live.pending)
        found = [(live, num_wanted[key]) for key, live in oldest.items()]
        return sorted(found, key=lambda one: one[0].priority_class.rank)

    def starved_on(self, shard: Shard, before: float) -> PriorityClass | None:
        """The most urgent class with a sequence there that was sent at `before` or earlier and has not started."""
        waiting = [
            choice.request.priority_class
            for slot, choice in shard.choices.items()
            if choice.num_cached_tokens is None and shard.attempts[slot].sent_at <= before
        ]
        return min(waiting, key=lambda one: one.rank, default=None)

    def note_preempted(self, model: str, priority_class: PriorityClass, until: float) -> None:
        """Sequences gave way to that class: until then, others leave a part of the batch to it."""
        rank, _ = self._contended.get(model, (priority_class.rank, 0.0))
        self._contended[model] = min(rank, priority_class.rank), until

    def candidates(self, shard: Shard, rank: int, now: float) -> Iterable[Choice]:
        """The sequences there that give way to a request of that rank: those with least to lose first, that is of the
        least urgent class, not started, with the fewest tokens to compute again, and of those the youngest."""
        able = [
            choice
            for choice in shard.choices.values()
            if choice.request.priority_class.rank > rank
            and choice.request.priority_class.rank_after(now - choice.request.arrived_at) > rank
        ]
        return sorted(able, key=_cost)


def _cost(choice: Choice) -> tuple[int, bool, int, float]:
    live = choice.request
    num_tokens = len(live.request.prompt_token_ids) + len(choice.output_token_ids)
    return -live.priority_class.rank, choice.num_cached_tokens is not None, num_tokens, -live.arrived_at


def _held(shard: Shard, names: set[str]) -> dict[str, tuple[int, int]]:
    """The places and blocks that each of these classes has there."""
    held: dict[str, tuple[int, int]] = dict.fromkeys(names, (0, 0))
    for choice in shard.choices.values():
        name = choice.request.priority_class.name
        if name in held:
            num_places, num_blocks = held[name]
            held[name] = num_places + 1, num_blocks + num_blocks_of(choice, shard)
    return held
