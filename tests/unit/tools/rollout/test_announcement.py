"""A supervisor renews the share of a rollout as long as it can, in virtual time."""

from __future__ import annotations

import dataclasses

import redis.exceptions

from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.discovery.registry import TTL_SECONDS
from lab.dst.timeline import Timeline
from lab.dst.virtual_loop import VirtualLoop
from tools.supervisor.rollout.announcement import RolloutAnnouncement

RECORD = RolloutRecord("m", ("m",), old="m", new="m@2", share=0.0, address="a", incarnation_id="i")


@dataclasses.dataclass
class FakeRegistry:
    """Remembers when which share was announced."""

    timeline: Timeline
    is_away: bool = False
    announced: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    async def announce(self, record: RolloutRecord) -> None:
        if self.is_away:
            raise redis.exceptions.ConnectionError("away")
        self.announced.append((self.timeline.now, record.share))

    async def withdraw(self, key: str, incarnation_id: str = "") -> None:
        pass

    async def close(self) -> None:
        pass


class World:
    def __init__(self) -> None:
        self.timeline = Timeline(0.0)
        self.loop = VirtualLoop(self.timeline)
        self.registry = FakeRegistry(self.timeline)
        self.announcement = RolloutAnnouncement(self.registry, RECORD)

    def announce(self, share: float) -> None:
        self.loop.start(self.announcement.announce(share))
        self.timeline.run_until(self.timeline.now)

    @property
    def is_lost(self) -> bool:
        found: list[bool] = []

        async def ask() -> None:
            found.append(self.announcement.is_lost)

        self.loop.start(ask())
        self.timeline.run_until(self.timeline.now)
        return found[0]


def test_a_share_is_renewed_and_a_short_outage_changes_nothing() -> None:
    """Its record would expire."""
    world = World()
    world.announce(0.5)
    world.registry.is_away = True
    world.timeline.run_until(3.5)
    world.registry.is_away = False
    world.timeline.run_until(6.5)
    assert world.registry.announced == [(0.0, 0.5), (4.0, 0.5), (5.0, 0.5), (6.0, 0.5)]
    assert not world.is_lost
    world.loop.kill()


def test_what_has_expired_does_not_come_back_by_itself() -> None:
    """Edges and routers have gone back to the old version. Sessions would come and go when a suspended supervisor
    continues, or the registry is back."""
    world = World()
    world.announce(0.5)
    world.loop.pause()
    world.timeline.run_until(TTL_SECONDS + 1.0)
    world.loop.unpause()
    world.timeline.run_until(20.0)
    assert world.registry.announced == [(0.0, 0.5)]
    assert world.is_lost
    world.announce(0.0)
    world.timeline.run_until(21.5)
    assert world.registry.announced[1:] == [(20.0, 0.0), (21.0, 0.0)]
    assert not world.is_lost
    world.loop.kill()
