"""A router process: the real core and the real result cache inside a simulated service shell."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvloom.errors import KvloomError
from kvloom_common.config import ResultCacheConfig
from lab.dst import script
from lab.dst.checker import Violation
from lab.dst.environment import Environment
from lab.dst.nodes.client import ClientStream
from lab.dst.nodes.fleet_reader import FleetReader
from lab.dst.nodes.safety import SimSafety, SimulatedSafetyStream
from lab.dst.nodes.shard import SimulatedShard
from lab.dst.nodes.shard_stream import ShardStream
from lab.dst.witness import Witness
from router.core.actions import (
    Action,
    AnswerCompleted,
    AnswerFlagged,
    AnswerResampled,
    CancelOnShard,
    CheckPrompt,
    FleetChanged,
    LeasesWanted,
    LimitsCounted,
    PlacementDecided,
    PrefillLegCounted,
    RequestEnded,
    RequestsMoved,
    ScreenAnswers,
    SendStep,
    SequencesPreempted,
    ShardHealthChanged,
    SideCallDecided,
    SubmitAttempt,
    WantKvSnapshot,
)
from router.core.core import RouterCore
from router.core.events import (
    DrainEnded,
    Event,
    Request,
    RequestArrived,
    SafetyDown,
    SafetyUp,
    StepArrived,
    Tick,
    TokensOnlyFrame,
)
from router.core.placement import POLICIES
from router.features.fingerprints import ModelFingerprint
from router.features.result_cache.cache import ResultCache
from router.features.result_cache.stored_answer import StoredChoice
from router.features.result_recorder import ResultRecorder

TTL_SECONDS = 2.0


def new_keeper(policy_revision: Callable[[], str | None], now: Callable[[], float]) -> ResultRecorder:
    """With a cache so small that answers are evicted, and expire."""
    config = ResultCacheConfig(enabled=True, ttl_seconds=TTL_SECONDS)
    cache = ResultCache(config, b"", _pieces, key_of=_key, max_entries=6)
    return ResultRecorder(cache, None, policy_revision, now)


def _key(_secret: bytes, scope: str, fingerprint: ModelFingerprint, policy_revision: str, request: Request) -> bytes:
    indexes = [spec.index for spec in request.choices]
    parts = (scope, fingerprint, policy_revision, *content_of(request), indexes)
    return hashlib.sha256(repr(parts).encode()).digest()


def content_of(request: Request) -> tuple[object, ...]:
    """Returns what a request asks for."""
    assert isinstance(request.sampling, script.ScriptedSampling)
    prompt = tuple(request.prompt_token_ids), request.prompt_text
    return request.model, request.adapter, *prompt, request.sampling.script_key, request.max_tokens


def _pieces(_request: Request, choice: StoredChoice) -> Sequence[str] | None:
    """Returns the pieces of text that a shard sends: see script.text_shown."""
    tokens = choice.token_ids
    texts = [script.text_shown(tokens, count + 1, is_final=count + 1 == len(tokens)) for count in range(len(tokens))]
    if not texts or len(texts[-1]) != choice.num_chars:
        return None
    return [text[len(before) :] for before, text in zip(["", *texts], texts, strict=False)]


MIN_TICK_SECONDS = 0.001


class RouterNode:
    """One incarnation of a router; a restart creates another. It has a clock of its own."""

    def __init__(
        self,
        env: Environment,
        number: int,
        incarnation: int,
        shards: Sequence[SimulatedShard],
        safety: SimSafety,
        fleet: FleetReader | None,
        on_report: Callable[[str, FleetChanged | RequestEnded], None],
    ) -> None:
        """Without `fleet`, the router knows all shards from the beginning. `on_report` is called with what edges and
        the supervisor learn from it."""
        self._env = env
        self._fleet = fleet
        self._on_report = on_report
        self._shards = shards
        self._safety_service = safety
        self.number = number
        self.incarnation = incarnation
        self.name = f"router-{number}.{incarnation}"
        self.limits = env.limits
        config = env.scenario.config
        limiter = None
        if self.limits is not None:
            config, limiter = dataclasses.replace(config, meters_usage=True), self.limits.limiter(self)
        self.core = RouterCore(config, seed=env.scenario.seed + number, limiter=limiter)
        self.config = config
        self.holds_requests = POLICIES[self.config.policy]().hold is not None
        """True when the policy may hold requests back although a shard has room."""
        self.tenants = env.scenario.tenants
        self.is_harmless = env.scenario.is_harmless
        """True when nothing happens that breaks off an answer."""
        self.witness = Witness(self.config)
        self.clients: dict[str, ClientStream] = {}
        self.streams: dict[str, ShardStream] = {}
        """The streams that the core knows of, by shard."""
        self.connecting: dict[str, ShardStream] = {}
        self.safety: SimulatedSafetyStream | None = None
        self.is_alive = True
        self.is_draining = False
        self.policy_revision: str | None = None
        self._keeper: ResultRecorder | None = None
        if env.scenario.has_result_cache:
            self._keeper = new_keeper(lambda: self.policy_revision, lambda: self.now)
        self._clock_offset = env.rng.choice((0.0, 12345.678))
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._num_pauses = 0
        self._timer_at: float | None = None
        self.here_since = self.now
        """When it last stopped being paused, by its own clock."""

    @property
    def is_paused(self) -> bool:
        return self._num_pauses > 0

    @property
    def stuck_shard_ids(self) -> set[str]:
        """The shards that produce no tokens. The router has to find this out by itself."""
        return {shard.shard_id for shard in self._shards if shard.is_stuck}

    @property
    def now(self) -> float:
        return self._env.timeline.now + self._clock_offset

    # -- the process --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for shard in self._shards:
            self._env.timeline.after(self._env.rng.random() * 0.01, self.connect, shard)
        if self._fleet is not None:
            self._fleet.start(self)
        self.reconnect_safety()

    def stop(self) -> None:
        """The process is killed. All peers see their streams break."""
        self.is_alive = False
        for stream in (*self.streams.values(), *self.connecting.values()):
            stream.is_open_at_router = False
            stream.break_off(0.0, self._env.rng.random() * 0.1)
        for client in list(self.clients.values()):
            client.break_off()
        if self.safety is not None:
            self.safety.close()

    def pause(self) -> None:
        """Until `unpause` nothing is read and no timer fires. The clock then appears to have jumped."""
        self._num_pauses += 1

    def unpause(self) -> None:
        self._num_pauses -= 1
        self.here_since = self.now
        self._drain_inbox()

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """Run `callback` as soon as the process is not paused. A dead process ignores it."""
        self._inbox.append((callback, args))
        self._drain_inbox()

    def _drain_inbox(self) -> None:
        while self._inbox and not self._num_pauses and self.is_alive:
            callback, args = self._inbox.popleft()
            callback(*args)

    def end_drain(self) -> None:
        """The drain deadline has passed."""
        self.handle(DrainEnded())
        self.check_integrity()

    # -- links --------------------------------------------------------------------------------------------------------

    def connect(self, shard: SimulatedShard, *, replace: bool = False) -> None:
        """Open a stream unless there is one (that is not to be replaced) or one is being opened."""
        shard_id = shard.shard_id
        if shard not in self._shards:
            # Its model has been unloaded, and its name may be that of another shard now.
            for other in self._shards:
                if other.shard_id == shard_id:
                    self.connect(other, replace=replace)
            return
        if not self.is_alive or shard_id in self.connecting or (shard_id in self.streams and not replace):
            return
        if self._fleet is not None and not self._fleet.may_connect(self, shard):
            return
        stream = self.connecting[shard_id] = ShardStream(self._env, self, shard)
        self._env.timeline.after(self._env.scenario.latency_seconds, shard.accept, stream)

    def accepts(self, stream: ShardStream, incarnation_id: str) -> bool:
        """True when the process at the other end of a new stream is the one that was meant."""
        return self._fleet is None or self._fleet.accepts(stream.shard.shard_id, incarnation_id)

    def read_registry(self) -> None:
        if self._fleet is not None:
            self._fleet.read(self)

    def give_up(self, shard_id: str) -> None:
        """End the link to a shard."""
        for stream in (self.streams.get(shard_id), self.connecting.get(shard_id)):
            if stream is not None:
                stream.give_up()

    def reconnect_safety(self) -> None:
        self._env.timeline.after(self._env.rng.random() * 0.05, self._connect_safety)

    def _connect_safety(self) -> None:
        if not self.is_alive or self.safety is not None:
            return
        safety = self._safety_service
        if safety.is_up:
            self.safety = SimulatedSafetyStream(self._env, self, safety)
            safety.streams.append(self.safety)
            self.safety.send_policy()
        else:
            self.reconnect_safety()

    # -- the core -----------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Pass an event to the core, run the checkers, and carry out the actions."""
        checks, witness, now = self._env.checks, self.witness, self.now
        if self._keeper is not None:
            event = self._through_keeper(self._keeper, event)
        self._env.record_event(self.name, event)
        checks.before_event(self, event)
        witness.take_event(event, now)
        try:
            actions = self.core.handle(_as_links_deliver(event), now)
        except Exception as error:
            raise Violation("never_fails", f"{type(event).__name__} made the core raise {error!r}") from error
        self._env.record_actions(actions)
        witness.take_actions(actions, checks, self)
        checks.after_event(self, event, actions)
        for action in actions:
            self._carry_out(action)
            if self.limits is not None and isinstance(action, RequestEnded):
                self.limits.record(self, action)
        self._arm_timer()

    def _through_keeper(self, keeper: ResultRecorder, event: Event) -> Event:
        """Does what the driver and the link to the safety service do before the core gets an event."""
        match event:
            case SafetyUp():
                self.policy_revision = f"{event.screens_prompts} {event.screens_answers}"
            case SafetyDown():
                self.policy_revision = None
            case RequestArrived():
                return keeper.arrived(event.request) or event
            case _:
                pass
        return event

    def handle_malformed(self, event: Event) -> None:
        """Pass an event that violates the protocol. The core must reject it and change nothing; the caller closes the
        stream that it came from."""
        self._env.record_event(self.name, event)
        try:
            self.core.handle(event, self.now)
        except KvloomError:
            self.check_integrity()
            return
        except Exception as error:
            raise Violation("never_fails", f"a malformed frame made the core raise {error!r}") from error
        raise Violation("never_fails", "the core accepted a malformed frame")

    def check_integrity(self) -> None:
        self._env.checks.integrity(self)

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
            case AnswerCompleted():
                assert self._keeper is not None
                self._keeper.completed(action)
            case FleetChanged():
                if self._keeper is not None:
                    self._keeper.fleet_changed(shard.description for shard in self.core.shards)
                self._on_report(self.name, action)
            case CheckPrompt() | ScreenAnswers():
                if self.safety is not None:
                    self.safety.send(action)
            case RequestEnded():
                self._on_report(self.name, action)
            case (
                PlacementDecided()
                | ShardHealthChanged()
                | RequestsMoved()
                | SequencesPreempted()
                | PrefillLegCounted()
                | AnswerResampled()
                | AnswerFlagged()
                | LimitsCounted()
                | SideCallDecided()
            ):
                pass
            case LeasesWanted():
                if self.limits is not None:
                    self.limits.ask(self, action)

    def _arm_timer(self) -> None:
        """Like the service shell, leave a timer alone that fires early enough."""
        deadline = self.core.next_deadline()
        if deadline is None or (self._timer_at is not None and self._timer_at <= deadline):
            return
        self._timer_at = max(deadline, self.now + MIN_TICK_SECONDS)
        lateness = self._env.rng.random() * 0.002
        at = self._timer_at - self._clock_offset + lateness
        self._env.timeline.at(at, self.post, self._tick, self._timer_at)

    def _tick(self, timer_at: float) -> None:
        if timer_at == self._timer_at:
            self._timer_at = None
            self.handle(Tick())
            self.check_integrity()


def _as_links_deliver(event: Event) -> Event:
    """A step that has nothing but tokens is delivered as a TokensOnlyFrame, as by the real links."""
    if isinstance(event, StepArrived) and event.step.is_plain:
        return TokensOnlyFrame(event.shard_id, event.step, tuple)
    return event
