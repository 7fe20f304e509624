"""A client process: it sends requests, reads answers, cancels, disconnects, and resumes what it has not received."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lab.dst.checker import Violation
from lab.dst.environment import Environment
from lab.dst.nodes.pipe import Pipe
from lab.dst.script import ScriptedSampling
from lab.dst.views import RouterProcess
from router.core.events import ChoiceSpec, ClientGone, Request, RequestArrived, RequestCancelled, SlotsCancelled
from router.core.frames import Finish, Step
from router.links.step_outbox import StepOutbox


@dataclasses.dataclass(slots=True, eq=False)
class ObservedAnswer:
    """One choice as its client sees it."""

    request: Request
    spec: ChoiceSpec
    num_tokens: int
    """Received so far, those of earlier streams included."""
    num_chars: int
    num_starts: int = 0
    num_logprobs: int = 0
    finish: Finish | None = None

    @property
    def script_key(self) -> str:
        assert isinstance(self.request.sampling, ScriptedSampling)
        return self.request.sampling.script_key


class ClientStream:
    """Both ends of the stream between a client and a router. The router's end does what `ClientLink` does: frames that
    the client has not read collect in the real StepOutbox, and a stream whose outbox overflows is closed.

    `on_lost` is called when the client loses the stream, `on_end` for an answer that has ended, well or not."""

    def __init__(
        self,
        env: Environment,
        node: RouterProcess,
        name: str,
        on_lost: Callable[[ClientStream], None],
        on_end: Callable[[ObservedAnswer], None],
    ) -> None:
        self._env = env
        self.node = node
        self.client_id = name
        self._on_lost = on_lost
        self._on_end = on_end
        latency = env.scenario.latency_seconds
        self._to_router = Pipe(env.timeline, env.rng, self._arrive_at_router, latency)
        self._to_client = Pipe(env.timeline, env.rng, self._arrive_at_client, latency)
        self._outbox = StepOutbox(env.scenario.max_waiting_entries)
        self._is_writing = False
        self.write_seconds: float | None = 0.0002
        """How long the client takes to read a frame. None means that it never does."""
        self.is_open_at_router = True
        self.is_open_at_client = True
        self.open: dict[int, ObservedAnswer] = {}
        """The answers that have not ended, by slot."""
        self._next_slot = 0
        node.clients[name] = self

    # -- the client's end ---------------------------------------------------------------------------------------------

    def take_slot(self) -> int:
        self._next_slot += 1
        return self._next_slot

    def submit(self, request: Request) -> None:
        for spec in request.choices:
            self.open[spec.slot] = ObservedAnswer(request, spec, len(spec.output_token_ids), spec.num_delivered_chars)
        self._to_router.send(RequestArrived(request))

    def cancel_slots(self, slots: list[int]) -> None:
        self._to_router.send(SlotsCancelled(self.client_id, slots))

    def cancel_request(self, request_id: str) -> None:
        self._to_router.send(RequestCancelled(request_id))

    def leave(self) -> None:
        """The client disconnects without cancelling, and the router notices."""
        self.is_open_at_client = False
        self._to_router.cut()
        self._to_client.cut()
        self._env.timeline.after(self._env.rng.random() * 0.05, self.node.post, self.lost_at_router)

    def lost_at_client(self) -> None:
        """The router died or closed the stream. The client resumes the open answers where they stopped."""
        if self.is_open_at_client:
            self.is_open_at_client = False
            self._on_lost(self)

    # -- the router's end ---------------------------------------------------------------------------------------------

    def send_step(self, step: Step) -> None:
        if not self._outbox.add(step):
            self._env.timeline.after(0.0, self.node.post, self._end_too_slow)
        self._write()

    def lost_at_router(self) -> None:
        if self.is_open_at_router:
            self.is_open_at_router = False
            del self.node.clients[self.client_id]
            self.node.handle(ClientGone(self.client_id))

    def break_off(self) -> None:
        """The router's process has died."""
        self.is_open_at_router = False
        self._to_router.cut()
        self._to_client.cut()
        self._env.timeline.after(self._env.rng.random() * 0.05, self.lost_at_client)

    def _end_too_slow(self) -> None:
        if self.is_open_at_router:
            self.lost_at_router()
            self.break_off()

    def _write(self) -> None:
        if self._is_writing or not self._outbox or not self.is_open_at_router:
            return
        step = self._outbox.take()
        assert step is not None
        self._to_client.send(step)
        self._is_writing = True
        if self.write_seconds is not None:
            self._env.timeline.after(self.write_seconds, self._written)

    def _written(self) -> None:
        self._is_writing = False
        self._write()

    def resume_reading(self) -> None:
        """Called when a client that had stopped reading reads again."""
        self.write_seconds = 0.0002
        self._is_writing = False
        self._write()

    # -- arrivals -----------------------------------------------------------------------------------------------------

    def _arrive_at_router(self, event: RequestArrived | SlotsCancelled | RequestCancelled) -> None:
        self.node.post(self._take_event, event)

    def _take_event(self, event: RequestArrived | SlotsCancelled | RequestCancelled) -> None:
        if not self.is_open_at_router:
            return
        self.node.handle(event)
        self.node.check_integrity()

    def _arrive_at_client(self, step: Step) -> None:
        """Read a frame. Every part of it is reported to the checkers."""
        checks = self._env.checks
        checks.on_client_step(self, step)
        for start in step.starts:
            self._answer(start.slot).num_starts += 1
        for slot, _ in step.logprobs:
            self._answer(slot).num_logprobs += 1
        position = 0
        for i, (slot, delta) in enumerate(zip(step.slots, step.deltas, strict=True)):
            count = step.num_tokens[i] if step.num_tokens else 1
            answer = self._answer(slot)
            checks.on_client_delta(answer, step.token_ids[position : position + count], delta)
            answer.num_tokens += count
            answer.num_chars += len(delta)
            self._env.num_delivered_tokens += count
            position += count
        for finish in step.finishes:
            answer = self._answer(finish.slot)
            del self.open[finish.slot]
            answer.finish = finish
            checks.on_client_finish(answer, finish)
            self._on_end(answer)

    def _answer(self, slot: int) -> ObservedAnswer:
        answer = self.open.get(slot)
        if answer is None:
            raise Violation("ends_once", f"{self.client_id} read an entry for slot {slot}, which has ended")
        return answer
