"""Both ends of the stream between one router and one shard."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lab.dst.environment import Environment
from lab.dst.nodes.pipe import Pipe
from lab.dst.views import RouterProcess, ShardProcess
from router.core.events import (
    Event,
    KvChange,
    KvEventsArrived,
    LoadReported,
    ShardDown,
    ShardLoad,
    ShardUp,
    StepArrived,
)
from router.core.frames import Step


class ShardStream:
    def __init__(self, env: Environment, node: RouterProcess, shard: ShardProcess) -> None:
        self._env = env
        self.node = node
        self.shard = shard
        latency = env.scenario.latency_seconds
        self.to_shard = Pipe(env.timeline, env.rng, self._arrive_at_shard, latency)
        self.to_router = Pipe(env.timeline, env.rng, self._arrive_at_router, latency)
        self.is_open_at_router = True
        self.is_announced = False
        """True when the core has received ShardUp for this stream."""
        self.parts = Step()
        """The frame that the shard has not sent yet."""
        self.old_load: ShardLoad | None = None
        self.held_kv: KvEventsArrived | None = None
        """A batch that the next one is to overtake."""

    def break_off(self, router_notices_after: float, shard_notices_after: float) -> None:
        """Lose everything in flight. Each end notices after its own delay."""
        self.to_shard.cut()
        self.to_router.cut()
        self._env.timeline.after(router_notices_after, self.node.post, self.lost_at_router)
        self._env.timeline.after(shard_notices_after, self.shard.lose, self)

    def give_up(self) -> None:
        """The router closes the stream."""
        self.break_off(0.0, self._env.rng.random() * 0.05)
        self.lost_at_router()

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
        self._env.timeline.after(self._env.rng.random() * 0.2, node.connect, self.shard)

    # -- the shard's end ----------------------------------------------------------------------------------------------

    def send_frame(self, *events: Event) -> None:
        """Send `events` and the pending step as one frame. There is at most one frame per engine step."""
        frame = list(events)
        if self.parts:
            step, self.parts = self.parts, Step()
            if all(count == 1 for count in step.num_tokens):
                step.num_tokens = []
            frame.append(StepArrived(self.shard.shard_id, step))
        if frame:
            self.to_router.send(frame)

    def kv_events(self, number: int, changes: Sequence[KvChange]) -> list[Event]:
        """A batch of KV events as the router receives it: lost, duplicated, reordered or intact."""
        env = self._env
        batch = KvEventsArrived(self.shard.shard_id, number, changes)
        if env.chance("kv_events_lost"):
            return []
        if self.held_kv is None and env.chance("kv_events_reordered"):
            self.held_kv = batch
            return []
        events: list[Event] = [batch]
        if env.chance("kv_events_duplicated"):
            events.append(batch)
        if self.held_kv is not None:
            events.append(self.held_kv)
            self.held_kv = None
        return events

    def load_report(self, load: ShardLoad) -> list[Event]:
        if self._env.chance("load_report_lost"):
            return []
        if self.shard.has_hung_engine and self.old_load is not None:
            # A hung engine does not update its counts.
            load = msgspec.structs.replace(
                self.old_load,
                draining=load.draining,
                hand_over=load.hand_over,
                withdrawn=load.withdrawn,
                empty_within_seconds=load.empty_within_seconds,
            )
        old, self.old_load = self.old_load, load
        if old is not None and self._env.chance("load_report_stale"):
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
            hello = frame[0]
            if isinstance(hello, ShardUp) and not self.node.accepts(self, hello.shard.incarnation_id):
                self.give_up()
                return
            self._announce()
        for event in frame:
            self.node.handle(event)
        self.node.check_integrity()

    def _announce(self) -> None:
        """Handle the shard's hello. If the router has not noticed that the stream to an earlier incarnation broke, that
        stream is closed silently."""
        streams, shard_id = self.node.streams, self.shard.shard_id
        self.node.connecting.pop(shard_id, None)
        earlier = streams.get(shard_id)
        if earlier is not None:
            earlier.is_open_at_router = False
            earlier.to_shard.cut()
            earlier.to_router.cut()
            self._env.timeline.after(self._env.rng.random() * 0.1, self.shard.lose, earlier)
        streams[shard_id] = self
        self.is_announced = True
