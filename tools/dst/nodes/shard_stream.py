"""The stream between one router and one shard, with both of its ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from router.core.events import Event, KvChange, KvEventsArrived, LoadReported, ShardDown, ShardLoad, StepArrived
from router.core.frames import Step
from tools.dst.nodes.pipe import Pipe

if TYPE_CHECKING:
    from tools.dst.nodes.router_node import RouterNode
    from tools.dst.nodes.shard import SimShard
    from tools.dst.world import World


class ShardStream:
    def __init__(self, world: World, node: RouterNode, shard: SimShard) -> None:
        self._world = world
        self.node = node
        self.shard = shard
        latency = world.scenario.latency_seconds
        self.to_shard = Pipe(world.timeline, world.rng, self._arrive_at_shard, latency)
        self.to_router = Pipe(world.timeline, world.rng, self._arrive_at_router, latency)
        self.is_open_at_router = True
        self.is_announced = False
        """The core has been told of it."""
        self.parts = Step()
        """What the shard has to say and has not sent."""
        self.old_load: ShardLoad | None = None
        self.held_kv: KvEventsArrived | None = None
        """Overtaken by the next one."""

    def break_off(self, router_notices_after: float, shard_notices_after: float) -> None:
        """Nothing under way arrives; both ends see it, each in its own time."""
        self.to_shard.cut()
        self.to_router.cut()
        self._world.timeline.after(router_notices_after, self.node.post, self.lost_at_router)
        self._world.timeline.after(shard_notices_after, self.shard.lose, self)

    def lost_at_router(self) -> None:
        if not self.is_open_at_router:
            return
        self.is_open_at_router = False
        shard_id, node = self.shard.shard_id, self.node
        if node.connecting.get(shard_id) is self:
            del node.connecting[shard_id]
        if node.streams.get(shard_id) is self:
            del node.streams[shard_id]
            node.handle(ShardDown(shard_id))
            node.check_integrity()
        self._world.timeline.after(self._world.rng.random() * 0.2, node.connect, self.shard)

    # -- the shard's end ----------------------------------------------------------------------------------------------

    def send_frame(self, *events: Event) -> None:
        """At most one per step: what goes with it, and the news of its sequences."""
        frame = list(events)
        if self.parts:
            step, self.parts = self.parts, Step()
            if all(count == 1 for count in step.num_tokens):
                step.num_tokens = []
            self._world.num_engine_tokens += len(step.token_ids)
            frame.append(StepArrived(self.shard.shard_id, step))
        if frame:
            self.to_router.send(frame)

    def kv_events(self, number: int, changes: Sequence[KvChange]) -> list[Event]:
        """One batch as it reaches the router, or does not."""
        world = self._world
        batch = KvEventsArrived(self.shard.shard_id, number, changes)
        if world.chance("kv_events_lost"):
            return []
        if self.held_kv is None and world.chance("kv_events_reordered"):
            self.held_kv = batch
            return []
        events: list[Event] = [batch]
        if world.chance("kv_events_duplicated"):
            events.append(batch)
        if self.held_kv is not None:
            events.append(self.held_kv)
            self.held_kv = None
        return events

    def load_report(self, load: ShardLoad) -> list[Event]:
        if self._world.chance("load_report_lost"):
            return []
        if self.shard.has_hung_engine and self.old_load is not None:
            load = msgspec.structs.replace(
                self.old_load, draining=load.draining, hand_over=load.hand_over
            )  # nobody counts anew
        old, self.old_load = self.old_load, load
        if old is not None and self._world.chance("load_report_stale"):
            load = old
        return [LoadReported(self.shard.shard_id, load)]

    # -- arrivals -----------------------------------------------------------------------------------------------------

    def _arrive_at_shard(self, message: object) -> None:
        self.shard.receive(self, message)

    def _arrive_at_router(self, frame: list[Event]) -> None:
        self.node.post(self._take_frame, frame)

    def _take_frame(self, frame: list[Event]) -> None:
        if not self.is_open_at_router:
            return
        if not self.is_announced:
            self._announce()
        for event in frame:
            self.node.handle(event)
        self.node.check_integrity()

    def _announce(self) -> None:
        """The shard's hello is here. A stream to an earlier incarnation, whose break the router has not noticed, ends
        without another word."""
        streams, shard_id = self.node.streams, self.shard.shard_id
        self.node.connecting.pop(shard_id, None)
        earlier = streams.get(shard_id)
        if earlier is not None:
            earlier.is_open_at_router = False
            earlier.to_shard.cut()
            earlier.to_router.cut()
            self._world.timeline.after(self._world.rng.random() * 0.1, self.shard.lose, earlier)
        streams[shard_id] = self
        self.is_announced = True
