"""The shards of one model, in the order of the least that a request can cost there: its prefill, and the delay that
this is for the sequences of the shard.

    cost of a prompt >= key of the shard x prefill time of the prompt at the model's usual speed
    key = (weight of the prefill + weights x sequences that wait and run there) x how much slower the shard is

Keys do not depend on the prompt or the time: an event moves one shard, and a placement begins with the first one and
ends where no other can be cheaper.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final, NamedTuple

from router.core.load.load_view import LoadView
from router.core.load.speed_model import SpeedModel

MAX_DRIFT: Final = 0.01
"""When the model's speed has changed by this share, it becomes the usual one, and all keys are computed again."""


class OrderedShard(NamedTuple):
    """A shard's place. Of several with one key, the one that runs least goes first, then the one that was moved last
    the longest ago."""

    key: float
    num_running: int
    number: int
    shard_id: str


class CostOrder:
    """Shards are moved when the order is asked for, and not before: several events may have changed one."""

    __slots__ = (
        "_changed",
        "_drift",
        "_fleet_speed",
        "_num_moves",
        "_order",
        "_places",
        "_usual",
        "_views",
        "_weights",
    )

    def __init__(self, fleet_speed: SpeedModel) -> None:
        """`fleet_speed` is the prior of the model's shards."""
        self._fleet_speed = fleet_speed
        self._usual = fleet_speed.known
        self._drift = 1.0
        """A lower bound of how much slower than usual a shard is of which nothing was learned."""
        self._views: dict[str, LoadView] = {}
        self._changed: dict[str, None] = {}
        self._weights = (0.0, 0.0, 0.0)
        self._num_moves = 0
        self._places: dict[str, OrderedShard] = {}
        self._order: list[OrderedShard] = []

    def add(self, shard_id: str, view: LoadView) -> None:
        self._views[shard_id] = view
        self._changed[shard_id] = None

    def remove(self, shard_id: str) -> None:
        del self._views[shard_id]
        self._changed.pop(shard_id, None)
        place = self._places.pop(shard_id, None)
        if place is not None:
            del self._order[bisect_left(self._order, place)]

    @property
    def is_empty(self) -> bool:
        return not self._views

    def note_change(self, shard_id: str) -> None:
        """More or fewer sequences wait or run there, or its speed is another one than before."""
        self._changed[shard_id] = None

    def note_fleet_speed(self) -> None:
        """The speed of the prior is another one than before."""
        speed, usual = self._fleet_speed, self._usual
        self._drift = min(1.0, _slowness(speed, usual))
        is_usual = self._drift > 1 - MAX_DRIFT and speed.known[1] < (1 + MAX_DRIFT) * usual[1]
        if not is_usual or speed.num_observations == 1:
            self._usual, self._drift = speed.known, 1.0
            self._changed.update(dict.fromkeys(self._views))

    def usual_seconds(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """The time by which keys are multiplied for so many tokens after so many cached ones."""
        per_request, per_token, per_pair, _ = self._usual
        seconds = per_request + per_token * num_tokens + per_pair * (num_tokens * (num_cached_tokens + num_tokens / 2))
        return seconds * self._drift

    def cheapest_first(self, of_prefill: float, of_waiting: float, of_running: float) -> Sequence[OrderedShard]:
        """Returns all shards, the lowest key first, until something changes."""
        weights = (of_prefill, of_waiting, of_running)
        if weights != self._weights:
            self._weights = weights
            self._changed.update(dict.fromkeys(self._views))
        if self._changed:
            for shard_id in self._changed:
                self._move(shard_id)
            self._changed.clear()
        return self._order

    def _move(self, shard_id: str) -> None:
        key, num_running = self._key(shard_id), self._views[shard_id].num_running
        before = self._places.get(shard_id)
        if before is not None:
            if (key, num_running) == before[:2]:
                return
            del self._order[bisect_left(self._order, before)]
        self._num_moves += 1
        place = self._places[shard_id] = OrderedShard(key, num_running, self._num_moves, shard_id)
        insort(self._order, place)

    def _key(self, shard_id: str) -> float:
        view = self._views[shard_id]
        of_prefill, of_waiting, of_running = self._weights
        key = of_prefill + of_waiting * view.num_waiting + of_running * view.num_running
        if view.speed.num_observations or not self._fleet_speed.num_observations:
            return key * _slowness(view.speed, self._usual)
        return key  # it is as fast as the prior, whatever that learns

    def check_integrity(self) -> None:
        """Assert that every shard has one place, at the key that it has now unless it is to be moved."""
        assert sorted(self._order) == self._order == sorted(self._places.values())
        assert self._views.keys() == self._places.keys() | self._changed.keys()
        for shard_id in self._places.keys() - self._changed.keys():
            assert self._places[shard_id][:2] == (self._key(shard_id), self._views[shard_id].num_running)


def _slowness(speed: SpeedModel, usual: tuple[float, float, float, float]) -> float:
    """How many times longer than usual every prefill takes at least."""
    own, slowness = speed.known, math.inf
    for number in range(3):  # the time for the context beside it comes on top
        if usual[number] > 0.0 and own[number] < slowness * usual[number]:
            slowness = own[number] / usual[number]
    return slowness
