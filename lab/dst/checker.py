"""The interface of a checker: the hooks that the simulation calls, and the exception that a broken invariant raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn

from kvloom.errors import KvloomError
from kvloom_common.discovery.records import RolloutRecord
from lab.dst.observed import ObservedChoice, ObservedRequest
from lab.dst.told import Told
from lab.dst.views import (
    AnswerView,
    ClientStreamView,
    EdgeView,
    ShardStreamView,
    ShardView,
    SimulatedRouterView,
    WorldView,
)
from router.core.actions import Action, RequestEnded, SendStep, SequencesPreempted, ShardHealthChanged, SubmitAttempt
from router.core.events import ChoiceSpec, Event, KvChange, Request
from router.core.frames import Finish, Step


class Violation(AssertionError):  # noqa: N818  (it is a finding, not an error of this program)
    """An invariant was broken."""

    def __init__(self, invariant: str, detail: str) -> None:
        super().__init__(f"{invariant}: {detail}")
        self.invariant = invariant
        self.detail = detail


class Hooks:
    """Everything that the simulation reports. The hooks of a router are called before its witness records the part of
    the event that the hook is about."""

    # -- routers ------------------------------------------------------------------------------------------------------

    def before_event(self, node: SimulatedRouterView, event: Event) -> None:
        """The core is about to handle an event."""

    def on_dispatch(self, node: SimulatedRouterView, observed: ObservedRequest | None, attempt: SubmitAttempt) -> None:
        """The core dispatches a request to a shard."""

    def on_probe(self, node: SimulatedRouterView, attempt: SubmitAttempt) -> None:
        """The router itself requests one token from a shard."""

    def on_prefill_chunk(
        self, node: SimulatedRouterView, observed: ObservedRequest | None, prefill_chunk: SubmitAttempt
    ) -> None:
        """A shard is asked to prefill the beginning of the prompt of a queued request."""

    def on_prefill_leg(self, node: SimulatedRouterView, observed: ObservedRequest | None, leg: SubmitAttempt) -> None:
        """A shard is asked to compute the prompt of a request whose answer another shard gives."""

    def on_collection(self, node: SimulatedRouterView, collection: SubmitAttempt) -> None:
        """A shard is asked to fetch KV that no answer needs."""

    def on_preemption(self, node: SimulatedRouterView, preempted: SequencesPreempted) -> None:
        """Sequences leave a shard so that another tenant is served. They have been cancelled."""

    def on_health(self, node: SimulatedRouterView, change: ShardHealthChanged) -> None:
        """The health of a shard changes to suspected, probing or healthy."""

    def on_step(self, node: SimulatedRouterView, action: SendStep) -> None:
        """The core sends a frame to a client."""

    def on_sent(self, node: SimulatedRouterView, choice: ObservedChoice, token_ids: Sequence[int], delta: str) -> None:
        """The frame has this entry for one choice."""

    def on_finish(self, node: SimulatedRouterView, choice: ObservedChoice, finish: Finish) -> None:
        """The frame ends a choice."""

    def on_ended(self, node: SimulatedRouterView, observed: ObservedRequest | None, end: RequestEnded) -> None:
        """The core reports that a request has ended. Everything that was sent to its client has been recorded."""

    def after_event(self, node: SimulatedRouterView, event: Event, actions: Sequence[Action]) -> None:
        """The core has handled the event, and all of it has been recorded."""

    def integrity(self, node: SimulatedRouterView) -> None:
        """The router has handled a whole message, so that the core's state must be consistent."""

    # -- the registry -------------------------------------------------------------------------------------------------

    def on_registry_read(self, node: SimulatedRouterView, world: WorldView) -> None:
        """A router has read the registry and followed its records."""

    def on_registry_lost(self, node: SimulatedRouterView) -> None:
        """A router could not read the registry."""

    def on_link_ended(self, node: SimulatedRouterView, shard_id: str, world: WorldView) -> None:
        """A router gives up a shard, connected or not, because of what it has read. It still has the stream."""

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def on_version_told(self, edge: EdgeView, told: Told) -> None:
        """An edge tells a request the version that it gets."""

    def on_told_failed(self, edge: EdgeView, told: Told, answer: AnswerView, error: KvloomError) -> None:
        """The client of such a request gets an error, since no other model takes it."""

    def on_announced(self, record: RolloutRecord, now: float, lapsed_seconds: float) -> None:
        """The supervisor has announced the share of a rollout, for the first time or again. `lapsed_seconds`: how long
        ago its last announcement has expired."""

    def on_rollout_ended(self, name: str, standing: str, now: float) -> None:
        """A rollout is over, one way or the other: this model stands for the name."""

    def on_shard_stopped(self, shard: ShardView) -> None:
        """The process of a shard of a version that is unloaded ends, for ever."""

    # -- shards and clients -------------------------------------------------------------------------------------------

    def on_submit(self, shard: ShardView, stream: ShardStreamView, attempt: SubmitAttempt, spec: ChoiceSpec) -> None:
        """A choice arrives at a shard."""

    def on_fetch(self, shard: ShardView, attempt: SubmitAttempt) -> None:
        """A shard uses a hand-off, for an answer or to collect it."""

    def on_handoff(self, shard: ShardView, request: Request, handoff: bytes) -> None:
        """A shard has computed the prompt of a leg, and hands its KV over."""

    def on_stored(self, shard: ShardView, request: Request, changes: Sequence[KvChange]) -> None:
        """The blocks of a request have entered the prefix cache of a shard, and these are the changes."""

    def on_client_step(self, stream: ClientStreamView, step: Step) -> None:
        """A client reads a frame."""

    def on_client_delta(self, answer: AnswerView, token_ids: Sequence[int], delta: str) -> None:
        """The frame has this entry. `answer` does not contain it yet."""

    def on_client_finish(self, answer: AnswerView, finish: Finish) -> None:
        """The frame ends an answer. `answer` is complete."""

    def on_quiescence(self, world: WorldView) -> None:
        """Nothing is in flight, and no fault has struck for a while."""


HOOK_NAMES = tuple(name for name in vars(Hooks) if not name.startswith("_"))


class Checker(Hooks):
    """Watches one invariant and raises Violation when it is broken. A checker overrides the hooks that it needs. Every
    simulated world has checkers of its own."""

    invariant: ClassVar[str]

    def fail(self, detail: str) -> NoReturn:
        raise Violation(self.invariant, detail)
