"""The faults that strike by themselves: a method for each kind, at times that the seed determines.
The registry has faults of its own: bad and stale records, and none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from kvloom.v1.generation_pb2 import FinishReason
from lab.dst.adapter_changes import SimulatedAdapterChanges
from lab.dst.model_changes import SimulatedModelChanges
from lab.dst.nodes.client import ClientStream
from lab.dst.nodes.router_node import RouterNode
from lab.dst.nodes.shard import SimulatedShard
from lab.dst.rollout_changes import RolloutChanges
from lab.dst.scenario import (
    ADAPTER_CHANGES_PER_SECOND,
    FAULTS_PER_SECOND,
    MODEL_CHANGES_PER_SECOND,
    REGISTRY_FAULTS_PER_SECOND,
    ROLLOUT_CHANGES_PER_SECOND,
)
from lab.dst.world import World
from router.core.events import DrainStarted, StepArrived
from router.core.frames import Finish, Start, Step

_LATE_SECONDS: Final = (0.5, 4.0, 20.0)
"""How long what should not be there stays. The longest outlasts the time in which a live shard must be found."""


class RegistryFaults:
    def __init__(self, world: World) -> None:
        self._world = world
        self._registry = world.registry

    def _victim(self) -> SimulatedShard:
        return self._registry.rng.choice(self._world.shards)

    def _put(self, key: str, content: bytes, *, seconds: tuple[float, ...] = _LATE_SECONDS) -> None:
        if self._registry.is_reachable:
            self._registry.put(key, content, self._registry.rng.choice(seconds))

    def registry_garbage(self) -> None:
        """A value that is no record, in place of a true one or beside it."""
        rng = self._registry.rng
        content = rng.choice((rng.randbytes(20), b"[]", b'{"shard_id": 7}', b'{"shard_id":"x"}', b"[" * 3000, b""))
        self._put(rng.choice((self._victim().shard_id, "shard-new")), content)

    def registry_stale(self) -> None:
        """The record of an incarnation that has died, in place of the one that lives."""
        shard = self._victim()
        record = self._registry.record_of(shard, shard.incarnation - 1)
        self._put(shard.shard_id, msgspec.json.encode(record))

    def registry_name_twice(self) -> None:
        """A record of a shard under another name, or one with the address of another shard."""
        shard, other = self._victim(), self._victim()
        record = self._registry.record_of(shard)
        if self._registry.rng.random() < 0.5:
            self._put("shard-alias", msgspec.json.encode(record))
        else:
            moved = msgspec.structs.replace(record, address=other.shard_id, incarnation_id="moved")
            self._put(shard.shard_id, msgspec.json.encode(moved), seconds=_LATE_SECONDS[:2])

    def registry_removed(self) -> None:
        """The record of a shard that lives disappears."""
        if self._registry.is_reachable:
            self._registry.remove(self._victim().shard_id)

    def registry_down(self) -> None:
        self._registry.is_reachable = False
        self._world.env.timeline.after(self._registry.rng.random() * 1.5, self._world.repair_registry)


UNKNOWN_SLOT = 10**6


class Faults:
    """Until the world is calm. `FAULTS_PER_SECOND` names the methods, `REGISTRY_FAULTS_PER_SECOND` those of
    RegistryFaults, and `MODEL_CHANGES_PER_SECOND`, `ADAPTER_CHANGES_PER_SECOND` and `ROLLOUT_CHANGES_PER_SECOND` those
    of the classes named so."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._env = world.env
        self._registry = RegistryFaults(world)
        self._models = SimulatedModelChanges(world)
        self._adapters = SimulatedAdapterChanges(world)
        self._rollouts = RolloutChanges(world)
        self._rng = world.env.rng

    def start(self) -> None:
        changes = (*MODEL_CHANGES_PER_SECOND, *ADAPTER_CHANGES_PER_SECOND, *ROLLOUT_CHANGES_PER_SECOND)
        for kind in (*FAULTS_PER_SECOND, *REGISTRY_FAULTS_PER_SECOND, *changes):
            if kind in self._env.scenario.rates:
                self._schedule(kind)

    def _schedule(self, kind: str) -> None:
        rate = self._env.scenario.rates[kind]
        self._env.timeline.after(self._rng.expovariate(rate), self._strike, kind)

    def _strike(self, kind: str) -> None:
        if self._env.is_calm:
            return
        if self._world.shards:  # none: a supervisor that has died will start them again
            self._make(kind)
        self._schedule(kind)

    def _make(self, kind: str) -> None:
        if kind in MODEL_CHANGES_PER_SECOND:
            getattr(self._models, kind)()
        elif kind in ROLLOUT_CHANGES_PER_SECOND:
            getattr(self._rollouts, kind)()
        elif kind in ADAPTER_CHANGES_PER_SECOND:
            self._env.count_fault(kind)
            getattr(self._adapters, kind)()
        else:
            self._env.count_fault(kind)
            getattr(self._registry if kind in REGISTRY_FAULTS_PER_SECOND else self, kind)()

    def _shard(self) -> SimulatedShard:
        return self._rng.choice(self._world.shards)

    def _node(self) -> RouterNode:
        return self._rng.choice(self._world.nodes)

    def _delay(self, max_seconds: float) -> float:
        return self._rng.random() * max_seconds

    # -- shards -------------------------------------------------------------------------------------------------------

    def shard_crash(self) -> None:
        """The process crashes and later restarts as a new incarnation. Routers notice sooner or later."""
        shard = self._shard()
        if shard.is_up:
            shard.crash(self._rng.choice((0.0, 0.005, 0.3)))
            self._env.timeline.after(self._delay(0.4), shard.bring_up)

    def shard_reincarnation(self) -> None:
        """The new incarnation is up and connected before a router has noticed that the old one died."""
        shard = self._shard()
        if shard.is_up:
            shard.crash(0.5)
            shard.start()
            for node in self._world.nodes:
                node.connect(shard, replace=True)

    def shard_slow(self) -> None:
        shard = self._shard()
        shard.slowness = 10.0
        self._env.timeline.after(self._delay(self._rng.choice((0.5, 3.0))), shard.restore_speed)

    def shard_hung(self) -> None:
        """The process hangs; later it wakes up or is killed."""
        shard = self._shard()
        shard.hang()
        self._env.timeline.after(self._delay(self._hang_seconds()), self._end_hang, shard, shard.incarnation)

    def engine_hung(self) -> None:
        """The engine's thread hangs but the process does not."""
        shard = self._shard()
        shard.hang_engine()
        self._env.timeline.after(self._delay(self._hang_seconds()), shard.wake_engine)

    def _hang_seconds(self) -> float:
        """The longest possible duration. Some hangs outlast the patience of every router."""
        return self._rng.choice((0.6, 8.0))

    def _end_hang(self, shard: SimulatedShard, incarnation: int) -> None:
        if shard.incarnation != incarnation or not shard.is_hung:
            return
        if self._rng.random() < 0.5 or self._env.is_calm:
            shard.wake_up()
        else:
            shard.crash(self._delay(0.1))
            self._env.timeline.after(self._delay(0.2), shard.bring_up)

    def shard_draining(self) -> None:
        shard = self._shard()
        if shard.is_up:
            shard.set_draining(not shard.is_draining)

    def shard_hands_over(self) -> None:
        """The shard drains and its deadline passes, so that its sequences must move. Later it accepts work again."""
        shard = self._shard()
        if shard.is_up:
            shard.set_draining(True)
            self._env.timeline.after(self._delay(0.1), self._pass_deadline, shard, shard.incarnation)

    def _pass_deadline(self, shard: SimulatedShard, incarnation: int) -> None:
        if shard.is_up and shard.incarnation == incarnation and shard.is_draining:
            shard.hand_over()
            self._env.timeline.after(self._delay(1.0), self._end_drain, shard, incarnation)

    def _end_drain(self, shard: SimulatedShard, incarnation: int) -> None:
        if shard.is_up and shard.incarnation == incarnation:
            shard.set_draining(False)

    def spot_notice(self) -> None:
        """The shard's machine is slowed down and then taken away, after a notice, and another one comes later."""
        self._give_notice(SimulatedShard.crash, 0.005)

    def scale_in(self) -> None:
        """The shard is to end soon. It returns what is left when its time is over. Later the fleet grows again."""
        self._give_notice(SimulatedShard.leave)

    def _give_notice(self, end: Callable[..., None], *arguments: float) -> None:
        shard = self._shard()
        if shard.is_up and not shard.is_hung and not shard.is_ending and shard.ends_at is None:
            seconds = self._rng.choice((0.2, 0.4, 0.6))
            shard.take_notice(seconds)
            if end is SimulatedShard.crash:
                shard.slowness = 5.0  # or nearly all answers would end in time
            self._env.timeline.after(seconds, self._end_notice, shard, shard.incarnation, end, arguments)

    def _end_notice(
        self, shard: SimulatedShard, incarnation: int, end: Callable[..., None], arguments: tuple[float, ...]
    ) -> None:
        if not shard.is_up or shard.incarnation != incarnation or shard.ends_at is None:
            return  # it has died before, or does not end after all
        if self._env.is_calm or shard.is_hung:
            shard.set_draining(False)
            return
        end(shard, *arguments)
        self._env.timeline.after(self._delay(0.4), shard.bring_up)

    def fleet_outage(self) -> None:
        """All shards crash and come back one after another while many requests wait."""
        seconds = self._delay(0.5)
        for shard in self._world.shards:
            if shard.is_up:
                shard.crash(self._delay(0.02))
                self._env.timeline.after(seconds + self._delay(0.1), shard.bring_up)

    def cache_cleared(self) -> None:
        shard = self._shard()
        if shard.is_up and not shard.is_hung:
            shard.clear_cache()

    # -- links --------------------------------------------------------------------------------------------------------

    def stream_break(self) -> None:
        streams = list(self._node().streams.values())
        if streams:
            self._rng.choice(streams).break_off(self._delay(0.1), self._delay(0.1))

    def link_partition(self) -> None:
        """Both directions stall. Then the link heals, or both ends give up, each after its own delay."""
        streams = list(self._node().streams.values())
        if not streams:
            return
        stream = self._rng.choice(streams)
        stream.to_shard.stall()
        stream.to_router.stall()
        seconds = self._delay(0.5)
        if self._rng.random() < 0.5:
            self._env.timeline.after(seconds, stream.to_shard.heal)
            self._env.timeline.after(seconds + self._delay(0.05), stream.to_router.heal)
        else:
            self._env.timeline.after(seconds, stream.break_off, self._delay(0.2), self._delay(0.2))

    def late_frame(self) -> None:
        """A frame for slots that are not in use, or from an unknown shard. It must change nothing."""
        node = self._node()
        if node.is_paused:
            return
        shard_id = self._rng.choice((self._shard().shard_id, "shard-gone"))
        observed = node.witness.shards.get(shard_id)
        slots = [slot for slot in range(1, 12) if observed is None or slot not in observed.open] or [UNKNOWN_SLOT]
        slot = self._rng.choice(slots)
        finish = Finish(slot, FinishReason.FINISH_REASON_STOP)
        step = Step([slot], [], [7], ["7 "], starts=[Start(slot, 0)], finishes=[finish])
        node.handle(StepArrived(shard_id, step))
        node.check_integrity()

    def malformed_frame(self) -> None:
        """A frame that violates the protocol. The router must close the stream to its shard."""
        node = self._node()
        if node.streams and not node.is_paused:
            stream = self._rng.choice(list(node.streams.values()))
            node.handle_malformed(StepArrived(stream.shard.shard_id, Step([1, 2], [], [7], ["7 "])))
            stream.break_off(0.0, self._delay(0.05))

    # -- clients ------------------------------------------------------------------------------------------------------

    def _busy_stream(self) -> ClientStream | None:
        stream = self._world.traffic.any_stream()
        return stream if stream.open else None

    def client_cancels_choice(self) -> None:
        stream = self._busy_stream()
        if stream is not None:
            stream.cancel_slots([self._rng.choice(list(stream.open)), UNKNOWN_SLOT])

    def client_cancels_request(self) -> None:
        stream = self._busy_stream()
        if stream is not None:
            answer = self._rng.choice(list(stream.open.values()))
            stream.cancel_request(answer.request.request_id)

    def client_leaves(self) -> None:
        stream = self._world.traffic.any_stream()
        stream.leave()
        self._world.traffic.add_stream(stream.node.number)

    def client_stops_reading(self) -> None:
        """The client reads slowly, or not at all."""
        stream = self._world.traffic.any_stream()
        stream.write_seconds = self._rng.choice((0.2, None))
        self._env.timeline.after(self._delay(1.0), stream.resume_reading)

    def duplicate_request_id(self) -> None:
        """A request whose id is in use. It is rejected, and the first request of that id continues undisturbed."""
        stream = self._busy_stream()
        if stream is not None:
            answer = self._rng.choice(list(stream.open.values()))
            self._world.traffic.send_again(stream, answer.request, answer.request.request_id)

    def reused_request_id(self) -> None:
        """A client cancels a request and sends it again at once under the same id."""
        stream = self._busy_stream()
        if stream is not None:
            answer = self._rng.choice(list(stream.open.values()))
            stream.cancel_request(answer.request.request_id)
            self._world.traffic.send_again(stream, answer.request, answer.request.request_id)

    def burst(self) -> None:
        stream = self._world.traffic.any_stream()
        for _ in range(self._rng.choice((5, 30))):
            self._world.traffic.send_request(stream)

    # -- routers ------------------------------------------------------------------------------------------------------

    def router_restart(self) -> None:
        self._world.restart_router(self._rng.randrange(len(self._world.nodes)))

    def router_draining(self) -> None:
        """The router rejects new requests and continues the running ones. After a while it is replaced."""
        node = self._node()
        if not node.is_draining and not node.is_paused:
            node.is_draining = True
            node.handle(DrainStarted())
            self._env.timeline.after(self._delay(0.4), self._world.replace_drained, node)

    def router_drain_deadline(self) -> None:
        """The router drains, and its deadline passes before the running requests have ended."""
        self.router_draining()
        for node in self._world.nodes:
            if node.is_draining:
                self._env.timeline.after(self._delay(0.2), node.post, node.end_drain)

    def router_pause(self) -> None:
        """One router process, or the machine of all of them, is paused. Afterwards its clock has jumped."""
        nodes = self._world.nodes if self._rng.random() < 0.3 else [self._node()]
        seconds = self._rng.choice((0.02, 0.2, 1.5))
        for node in nodes:
            node.pause()
            self._env.timeline.after(seconds, node.unpause)

    # -- safety -------------------------------------------------------------------------------------------------------

    def safety_down(self) -> None:
        safety = self._world.safety
        if safety.is_up:
            safety.stop()
            self._env.timeline.after(self._delay(0.3), safety.bring_up)

    def safety_slow(self) -> None:
        safety = self._world.safety
        safety.slowness = self._rng.choice((5.0, 50.0))
        self._env.timeline.after(self._delay(0.5), safety.restore_speed)

    def safety_policy_change(self) -> None:
        self._world.safety.change_policy()
