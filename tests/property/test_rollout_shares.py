"""Edges follow a rollout whose record reaches each of them late, out of step, or not at all: seeded random courses."""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence

import pytest
import xxhash

from kvloom_common.config import RouteTarget
from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.models import model_routes
from kvloom_common.models.model_routes import ModelRoutes, RouteFacts

NUM_EDGES = 3
SESSIONS = [f"session-{i}" for i in range(40)]


class Edge:
    """What it chose for each session, one after the other, since its share last fell."""

    def __init__(self) -> None:
        self.routes = ModelRoutes()
        self.share = 0.0
        self.seen: dict[str, str] = {}

    def learn(self, share: float | None) -> None:
        """None: the record has expired for this edge."""
        if (share or 0.0) < self.share:
            self.seen.clear()  # a rollback moves sessions, as it should
        self.share = share or 0.0
        record = RolloutRecord("m", ("m",), "m", "m@2", self.share, "a", "i")
        self.routes.follow_rollouts([] if share is None else [record])

    def serve(self, session: str) -> str:
        facts = RouteFacts(1, frozenset(), False, session)
        model = self.routes.choose("m", (), facts, ("m", "m@2")).models[0]
        assert (self.seen.get(session), model) != ("m@2", "m"), f"{session} went back at a share of {self.share}"
        self.seen[session] = model
        return model


def run(seed: int) -> None:
    """One course: growing shares that arrive late, losses of the record, sometimes a rollback. In the end all edges
    agree with the last record."""
    rng = random.Random(seed)
    edges = [Edge() for _ in range(NUM_EDGES)]
    shares = sorted(rng.random() for _ in range(rng.randrange(1, 6)))
    for share in [*shares, *([0.0] if rng.random() < 0.3 else [1.0])]:
        waiting = list(edges)
        while waiting:
            for _ in range(rng.randrange(5)):
                rng.choice(edges).serve(rng.choice(SESSIONS))
            edge = waiting.pop(rng.randrange(len(waiting)))
            if rng.random() < 0.1:
                edge.learn(None)
                waiting.append(edge)
            else:
                edge.learn(share)
        chosen = [[edge.serve(session) for session in SESSIONS] for edge in edges]
        assert chosen[0] == chosen[1] == chosen[2]
        if share in (0.0, 1.0):
            assert set(chosen[0]) == {"m@2" if share else "m"}


@pytest.mark.parametrize("seed", range(200))
def test_sessions_move_once_and_edges_agree(seed: int) -> None:
    """Whatever the order in which edges hear of a step, no user goes back and forth, and shares converge."""
    run(seed)


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash that depends on the share keeps the share, and moves sessions with every step."""

    def drawn(route: str, targets: Sequence[RouteTarget], key: str) -> str:
        position = xxhash.xxh3_64_intdigest(f"{route}{targets[-1].weight}{key}".encode()) / 2**64
        return targets[0].model if len(targets) == 1 or position < targets[0].weight else targets[-1].model

    monkeypatch.setattr(model_routes, "_drawn", drawn)
    with pytest.raises(AssertionError, match="went back"):
        collections.deque(map(run, range(50)), maxlen=0)
