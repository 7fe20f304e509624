"""Draws the session and the edge of each request, and does what the edge does when a version cannot take it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Final

import msgspec

from kvloom.errors import KvloomError
from kvloom_common.models.model_routes import FALLBACK_REASONS
from kvloom_common.models.succession import error_to_report
from lab.dst.environment import Environment
from lab.dst.nodes.client import ObservedAnswer
from lab.dst.rollouts.edge import SimEdge
from lab.dst.script import ScriptedSampling
from lab.dst.told import Told
from router.core.events import Request

NUM_SESSIONS: Final = 30


@dataclasses.dataclass(slots=True)
class Pending:
    """A request that an edge has sent to a router."""

    edge: SimEdge
    told: Told
    num_open: int
    """Choices that have not ended."""
    has_begun: bool = False
    """True when the client has something of an answer, so that no other model may take the request."""
    failed: list[ObservedAnswer] = dataclasses.field(default_factory=list)
    passed: list[tuple[str, KvloomError]] = dataclasses.field(default_factory=list)
    """The models that could not take the request before, and why."""

    def next_models(self) -> tuple[str, ...]:
        """Those that may take the request after the one that it was sent to."""
        return self.told.models[1:] or tuple(self.edge.fallback_models(self.passed))


class Sessions:
    """Its random numbers are its own."""

    def __init__(self, env: Environment, edges: Sequence[SimEdge]) -> None:
        self._env = env
        self._edges = edges
        self._rng = random.Random(f"{env.scenario.seed} sessions")
        self._sessions = [f"session-{self._rng.randrange(10**6)}" for _ in range(NUM_SESSIONS)]
        self._pending: dict[tuple[str, int], Pending] = {}
        """By client and its first slot."""

    def begin(self, request: Request) -> Request:
        """The request as an edge sends it to a router: in a session, and with the version that the edge tells it. One
        for an adapter names a model for which there are no shares."""
        edge = self._rng.choice(self._edges)
        session = self._draw_session() if self._rng.random() < 0.8 else ""
        request = msgspec.structs.replace(request, session_key=session)
        return request if request.adapter is not None else self._send(edge, edge.tell(request), request, [])

    def _draw_session(self) -> str:
        """Some have many requests."""
        return self._sessions[int(NUM_SESSIONS * self._rng.random() ** 2)]

    def _send(self, edge: SimEdge, told: Told, request: Request, passed: list[tuple[str, KvloomError]]) -> Request:
        self._env.checks.on_version_told(edge, told)
        key = (request.client_id, request.choices[0].slot)
        self._pending[key] = Pending(edge, told, len(request.choices), passed=passed)
        return msgspec.structs.replace(request, model=told.models[0])

    def note_end(self, answer: ObservedAnswer) -> Pending | None:
        """A choice has ended. Returns the request if it failed as a whole and another model may take it."""
        key = (answer.request.client_id, answer.request.choices[0].slot)
        pending, finish = self._pending.get(key), answer.finish
        if pending is None or finish is None:
            return None
        pending.num_open -= 1
        pending.has_begun |= finish.error is None or answer.num_tokens > 0
        if finish.error is not None:
            pending.failed.append(answer)
        if pending.num_open:
            return None
        del self._pending[key]
        told_error = None
        if not pending.has_begun and finish.error is not None and finish.error.reason in FALLBACK_REASONS:
            pending.passed.append((pending.told.models[0], finish.error))
            if pending.next_models():
                return pending
            told_error = error_to_report(pending.passed)
        for one in pending.failed:
            error = told_error or (None if one.finish is None else one.finish.error)
            if error is not None:
                self._env.checks.on_told_failed(pending.edge, pending.told, one, error)
        return None

    def pass_on(self, pending: Pending, request: Request) -> Request:
        """The request as the edge sends it to the next model. `request` has its own id and slots."""
        assert isinstance(request.sampling, ScriptedSampling)
        sampling = dataclasses.replace(request.sampling, script_key=request.request_id)
        told = dataclasses.replace(
            pending.told, script_key=request.request_id, models=pending.next_models(), is_chosen=False
        )
        return self._send(pending.edge, told, msgspec.structs.replace(request, sampling=sampling), pending.passed)
