"""A router process: the real core, and around it what the service shell does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvloom.errors import KvloomError
from router.core.actions import (
    Action,
    CancelOnShard,
    CheckPrompt,
    FleetChanged,
    PlacementDecided,
    RequestEnded,
    RequestsMoved,
    ScreenAnswers,
    SendStep,
    ShardHealthChanged,
    SubmitAttempt,
    WantKvSnapshot,
)
from router.core.core import RouterCore
from router.core.events import DrainEnded, Event, StepArrived, Tick, TokensOnlyFrame
from router.core.placement import POLICIES
from tools.dst.nodes.safety import SafetyStream
from tools.dst.nodes.shard_stream import ShardStream
from tools.dst.violation import Violation
from tools.dst.witness.witness import Witness

if TYPE_CHECKING:
    from tools.dst.nodes.client import ClientStream
    from tools.dst.nodes.shard import SimShard
    from tools.dst.world import World

MIN_TICK_SECONDS = 0.001


class RouterNode:
    """One life of a router: after a restart there is a new one. Its clock is its own."""

    def __init__(self, world: World, number: int, life: int) -> None:
        self._world = world
        self.number = number
        self.life = life
        self.name = f"router-{number}.{life}"
        self.core = RouterCore(world.scenario.config, seed=world.scenario.seed + number)
        self.config = world.scenario.config
        self.holds_requests = POLICIES[self.config.policy]().hold is not None
        """The policy lets requests wait for a shard that has room but enough to do."""
        self.tenants = world.scenario.tenants
        self.witness = Witness(self.config)
        self.clients: dict[str, ClientStream] = {}
        self.streams: dict[str, ShardStream] = {}
        """By shard: those that the core has been told of."""
        self.connecting: dict[str, ShardStream] = {}
        self.safety: SafetyStream | None = None
        self.is_alive = True
        self.is_draining = False
        self._clock_offset = world.rng.choice((0.0, 12345.678))
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._num_pauses = 0
        self._timer_at: float | None = None
        self.here_since = self.now
        """Since when it has not stood still."""

    @property
    def is_paused(self) -> bool:
        return self._num_pauses > 0

    @property
    def stuck_shard_ids(self) -> set[str]:
        """Those that make no tokens: the truth, which the router has to find out."""
        return {shard.shard_id for shard in self._world.shards if shard.is_stuck}

    @property
    def now(self) -> float:
        return self._world.timeline.now + self._clock_offset

    # -- the process --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for shard in self._world.shards:
            self._world.timeline.after(self._world.rng.random() * 0.01, self.connect, shard)
        self.reconnect_safety()

    def stop(self) -> None:
        """Killed: everybody else sees the streams break."""
        self.is_alive = False
        for stream in (*self.streams.values(), *self.connecting.values()):
            stream.is_open_at_router = False
            stream.break_off(0.0, self._world.rng.random() * 0.1)
        for client in list(self.clients.values()):
            client.break_off()
        if self.safety is not None:
            self.safety.close()

    def pause(self) -> None:
        """Its clock will jump: nothing is read and no timer fires until `go_on`."""
        self._num_pauses += 1

    def go_on(self) -> None:
        self._num_pauses -= 1
        self.here_since = self.now
        self._work_off()

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """Something arrives at this process."""
        self._inbox.append((callback, args))
        self._work_off()

    def _work_off(self) -> None:
        while self._inbox and not self._num_pauses and self.is_alive:
            callback, args = self._inbox.popleft()
            callback(*args)

    def end_drain(self) -> None:
        """Its patience is over."""
        self.handle(DrainEnded())
        self.check_integrity()

    # -- links --------------------------------------------------------------------------------------------------------

    def connect(self, shard: SimShard, *, replace: bool = False) -> None:
        """Try to, unless a stream is there (and is not to be replaced) or another try is under way."""
        shard_id = shard.shard_id
        if not self.is_alive or shard_id in self.connecting or (shard_id in self.streams and not replace):
            return
        stream = self.connecting[shard_id] = ShardStream(self._world, self, shard)
        self._world.timeline.after(self._world.scenario.latency_seconds, shard.accept, stream)

    def reconnect_safety(self) -> None:
        self._world.timeline.after(self._world.rng.random() * 0.05, self._connect_safety)

    def _connect_safety(self) -> None:
        if not self.is_alive or self.safety is not None:
            return
        safety = self._world.safety
        if safety.is_up:
            self.safety = SafetyStream(self._world, self, safety)
            safety.streams.append(self.safety)
            self.safety.tell_policy()
        else:
            self.reconnect_safety()

    # -- the core -----------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Have the core handle it, the checkers look at it, and carry out what it wants."""
        checks, witness, now = self._world.checks, self.witness, self.now
        self._world.note_event(self, event)
        checks.before_event(self, event)
        witness.take_event(event, now)
        try:
            actions = self.core.handle(_as_links_tell_it(event), now)
        except Exception as error:
            raise Violation("never_fails", f"{type(event).__name__} made the core raise {error!r}") from error
        self._world.note_actions(actions)
        witness.take_actions(actions, checks, self)
        checks.after_event(self, event, actions)
        for action in actions:
            self._carry_out(action)
        self._arm_timer()

    def handle_malformed(self, event: Event) -> None:
        """What breaks the protocol is refused, and changes nothing: the stream that brought it will be broken."""
        self._world.note_event(self, event)
        try:
            self.core.handle(event, self.now)
        except KvloomError:
            self.check_integrity()
            return
        except Exception as error:
            raise Violation("never_fails", f"a malformed frame made the core raise {error!r}") from error
        raise Violation("never_fails", "the core took a malformed frame for good")

    def check_integrity(self) -> None:
        self._world.checks.integrity(self)

    def _carry_out(self, action: Action) -> None:
        match action:
            case SubmitAttempt() | CancelOnShard() | WantKvSnapshot():
                stream = self.streams.get(action.shard_id)
                if stream is not None:
                    stream.to_shard.send(action)
            case SendStep():
                client = self.clients.get(action.client_id)
                if client is not None:
                    client.send_step(action.step)
            case CheckPrompt() | ScreenAnswers():
                if self.safety is not None:
                    self.safety.send(action)
            case RequestEnded() | FleetChanged() | PlacementDecided() | ShardHealthChanged() | RequestsMoved():
                pass

    def _arm_timer(self) -> None:
        """Like the shell's: a timer that is early is left alone."""
        deadline = self.core.next_deadline()
        if deadline is None or (self._timer_at is not None and self._timer_at <= deadline):
            return
        self._timer_at = max(deadline, self.now + MIN_TICK_SECONDS)
        lateness = self._world.rng.random() * 0.002
        at = self._timer_at - self._clock_offset + lateness
        self._world.timeline.at(at, self.post, self._tick, self._timer_at)

    def _tick(self, timer_at: float) -> None:
        if timer_at == self._timer_at:
            self._timer_at = None
            self.handle(Tick())
            self.check_integrity()


def _as_links_tell_it(event: Event) -> Event:
    """A step with nothing but tokens comes as a frame whose other news may be put off."""
    if isinstance(event, StepArrived) and event.step.is_plain:
        return TokensOnlyFrame(event.shard_id, event.step, tuple)
    return event
