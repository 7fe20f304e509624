"""From the request of any API that generates to the model that takes it: the one that it names, or the first that can
do so of a route and of the fallbacks that the client lists."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Final, Generic, Protocol, TypeVar

import msgspec
from aiohttp import web

from edge_http.edge import AdmissionPermit, Edge
from edge_http.endpoints.answering import GenerationJob, generate, read_prompt_body
from edge_http.endpoints.cascading import hold_candidate
from edge_http.endpoints.model_choice import outlives_connection, route_headers, share_key
from kvloom.errors import KvloomError
from kvloom.models.model_routes import BYTES_PER_TOKEN, FALLBACK_REASONS, Cascade, ChosenRoute, Feature, RouteFacts
from kvloom.models.served_model import ServedModel, adapters_by_model


class NamesModels(Protocol):
    """What every body says of the model."""

    model: str
    models: list[str] | None
    """Those to fall back to, in order."""


_LOGPROBS: Final[frozenset[Feature]] = frozenset(("logprobs",))

Body = TypeVar("Body", bound=NamesModels)


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationApi(Generic[Body]):
    """How the requests of an API are read. `decode` and `make_job` raise KvloomError; the others are what routes tell
    requests apart by."""

    decode: Callable[[Edge, bytes], Body]
    make_job: Callable[[Edge, web.BaseRequest, bytes, Body, ServedModel], Awaitable[GenerationJob]]
    """Validates the body and tokenizes it for a model."""
    features: Callable[[Body], frozenset[Feature]]
    is_batch: Callable[[Body], bool]
    max_answer_tokens: Callable[[Body], int]
    """The most that an answer may have; 0: no limit was given."""
    user_text: Callable[[Body], str]
    """The last message of the user."""


async def serve_generation(edge: Edge, request: web.BaseRequest, api: GenerationApi[Body]) -> web.StreamResponse:
    """Serve a POST that generates. Raises KvloomError while nothing has been sent."""
    caller = edge.callers.caller_of(request)
    with edge.admit(caller) as permit:
        with edge.bodies.lease(caller) as lease:
            raw = await read_prompt_body(edge, request, lease)
            body = api.decode(edge, raw)
            if edge.callers.have_tenants:
                is_any = edge.routes.is_any(body.model, edge.models)
                edge.check_models(request, (*(() if is_any else (body.model,)), *(body.models or ())))
            job, model = None, edge.models.get(body.model)
            if model is not None and body.models is None and body.model not in edge.routes.by_name:
                job = await api.make_job(edge, request, raw, body, model)
        if job is not None:
            return await generate(edge, request, permit, job)
        # The body is needed until a model has taken the request. It is no longer one that is being received.
        return await _RoutedRequest(edge, request, permit, api, raw, body, api.features(body)).generate()


@dataclasses.dataclass(slots=True)
class _RoutedRequest(Generic[Body]):
    """A request and the models that have passed it on."""

    edge: Edge
    request: web.BaseRequest
    permit: AdmissionPermit
    api: GenerationApi[Body]
    raw: bytes
    body: Body
    features: frozenset[Feature]
    passed: list[tuple[str, KvloomError]] = dataclasses.field(default_factory=list)
    """Those that could not take it, and why."""
    discarded: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Those whose answer did not pass a test, and which."""

    async def generate(self) -> web.StreamResponse:
        """Let the first of the models that can do so take the request. Raises the first one's KvloomError if none can,
        or one for which another model would not do better."""
        chosen = self._choose()
        # All attempts together have the time of one.
        deadline = asyncio.get_running_loop().time() + self.edge.config.request_timeout_seconds
        for name in self._tried(chosen):
            job = await self._job(chosen, name)
            if job is None:
                continue
            may_pass = not outlives_connection(self.edge, self.request, is_stream=job.stream)
            try:
                job = msgspec.structs.replace(job, deadline=deadline)
                if name not in chosen.cascades:
                    return await generate(self.edge, self.request, self.permit, job)
                response = await self._judged(chosen.cascades[name], job)
                if response is not None:
                    return response
            except KvloomError as error:
                if not may_pass:
                    raise
                self._pass_on(name, error)
        if not self.passed:  # "auto", and there is no model
            self.edge.usable_model(self.request, self.body.model)
        raise self.passed[0][1]

    def _choose(self) -> ChosenRoute:
        edge, body = self.edge, self.body
        facts = RouteFacts(
            len(self.raw) // BYTES_PER_TOKEN,
            self.features,
            self.api.is_batch(body),
            share_key(edge, self.request, body),
            self.api.max_answer_tokens(body),
            self.api.user_text(body) if edge.routes.reads_text else "",
        )
        served = edge.usable(self.request, adapters_by_model(edge.models.values()))
        return edge.routes.choose(body.model, body.models or (), facts, served)

    def _tried(self, chosen: ChosenRoute) -> list[str]:
        """An answer that outlives its connection cannot be judged first, as it belongs to a task that its name stands
        for: no model is asked whose answer may be discarded."""
        is_stream = bool(getattr(self.body, "stream", False))
        if chosen.cascades and outlives_connection(self.edge, self.request, is_stream=is_stream):
            return [name for name in chosen.models if name not in chosen.cascades]
        return list(chosen.models)

    async def _job(self, chosen: ChosenRoute, name: str) -> GenerationJob | None:
        """The request for a model; None: it cannot take it, which has been noted."""
        try:
            cascade = chosen.cascades.get(name)
            needs_logprobs = cascade is not None and "logprob" in cascade.tests.escalate_on
            features = self.features | _LOGPROBS if needs_logprobs else self.features
            model = self.edge.model_able_to(name, features)
            job = await self.api.make_job(self.edge, self.request, self.raw, self.body, model)
        except KvloomError as error:
            self._pass_on(name, error)
            return None
        headers = route_headers(chosen, model.name, self.passed, self.discarded)
        return msgspec.structs.replace(job, headers={**job.headers, **headers})

    async def _judged(self, cascade: Cascade, job: GenerationJob) -> web.StreamResponse | None:
        """Deliver the model's answer if it passes the tests; None: it does not, and was discarded."""
        edge = self.edge
        with edge.collected.lease(edge.callers.caller_of(self.request)) as lease:
            held, objection = await hold_candidate(edge, self.request, job, cascade, lease)
            if objection is None:
                return await generate(edge, self.request, self.permit, job, held)
        self.discarded.append((job.model.name, objection))
        return None

    def _pass_on(self, name: str, error: KvloomError) -> None:
        """Raises the error if another model would not do better."""
        if error.reason not in FALLBACK_REASONS:
            raise error
        self.passed.append((name, error))
