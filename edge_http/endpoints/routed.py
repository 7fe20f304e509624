"""From the request of any API that generates to the model that takes it: the one that it names, or the first that can
do so of a route and of the fallbacks that the client lists."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from aiohttp import web

from edge_http.admission import AdmissionPermit
from edge_http.edge import Edge
from edge_http.endpoints.answering import generate, read_prompt_body
from edge_http.endpoints.cascading import HeldRun, hold_candidate
from edge_http.endpoints.continuing import ContinuedRun, may_be_continued
from edge_http.endpoints.generation_job import GenerationJob
from edge_http.endpoints.model_choice import NamesModels, outlives_connection, pass_on, route_headers, share_key
from edge_http.endpoints.objectives import set_objectives
from edge_http.submission import RunAnswer, run_submission
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.models.model_routes import BYTES_PER_TOKEN, Cascade, ChosenRoute, Feature, RouteFacts
from kvloom_common.models.served_model import ServedModel, adapters_by_model
from kvloom_common.models.succession import error_to_report, fallback_models

_LOGPROBS: Final[frozenset[Feature]] = frozenset(("logprobs",))

Body = TypeVar("Body", bound=NamesModels)


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationApi(Generic[Body]):
    """How the requests of an API are read. `decode` and `make_job` raise KvloomError; the others are what routes tell
    requests apart by."""

    decode: Callable[[Edge, web.BaseRequest, bytes], Body]
    make_job: Callable[[Edge, web.BaseRequest, bytes, Body, ServedModel], Awaitable[GenerationJob]]
    """Validates the body and tokenizes it for a model."""
    features: Callable[[Body], frozenset[Feature]]
    is_batch: Callable[[Body], bool]
    max_answer_tokens: Callable[[Body], int]
    """The most that an answer may have; 0: no limit was given."""
    user_text: Callable[[Body], str]
    """The last message of the user."""
    generate: Callable[..., Awaitable[web.StreamResponse]] = generate
    """Submits the job and delivers its answer."""


async def serve_generation(edge: Edge, request: web.BaseRequest, api: GenerationApi[Body]) -> web.StreamResponse:
    """Serve a POST that generates. Raises KvloomError while nothing has been sent."""
    caller = edge.callers.caller_of(request)
    with edge.admission.admit(caller) as permit:
        with edge.admission.bodies.lease(caller) as lease:
            raw = await read_prompt_body(edge, request, lease)
            body = api.decode(edge, request, raw)
            edge.models.check_requested(request, body.model, body.models)
            job, model = None, edge.models.by_name.get(body.model)
            if model is not None and body.models is None and body.model not in edge.models.routes.by_name:
                job = await api.make_job(edge, request, raw, body, model)
        if job is not None:
            try:
                return await api.generate(edge, request, permit, job)
            except KvloomError as error:
                is_kept = outlives_connection(edge, request, is_stream=job.stream)
                if is_kept or not any(fallback_models([(body.model, error)], edge.models.by_name)):
                    raise
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
    may_wait: bool = False
    """True once it may wait for the first shard of a model."""

    async def generate(self) -> web.StreamResponse:
        """Let the first of the models that can do so take the request. Raises `error_to_report` if none can, or a
        KvloomError for which another model would not do better."""
        chosen = self._choose()
        # All attempts together have the time of one.
        deadline = asyncio.get_running_loop().time() + self.edge.request_timeout_seconds
        tried = self._tried(chosen)
        names = itertools.chain(tried, fallback_models(self.passed, self.edge.models.by_name), self._asked_again(tried))
        for number, name in enumerate(names, start=1):
            job = await self._job(chosen, name)
            if job is None:
                continue
            may_pass = not outlives_connection(self.edge, self.request, is_stream=job.stream)
            try:
                job.deadline, job.has_fallback_model = deadline, may_pass and number < len(tried)
                set_objectives(self.edge, self.request, job)
                if name not in chosen.cascades:
                    run = self._run(chosen, name, job)
                    return await self.api.generate(self.edge, self.request, self.permit, job, run)
                response = await self._judged(chosen.cascades[name], job)
                if response is not None:
                    return response
            except KvloomError as error:
                if not may_pass:
                    raise
                pass_on(self.passed, name, error)
        if not self.passed:  # "auto", and there is no model
            self.edge.models.find_usable(self.request, self.body.model)
        raise error_to_report(self.passed)

    def _choose(self) -> ChosenRoute:
        edge, body = self.edge, self.body
        facts = RouteFacts(
            len(self.raw) // BYTES_PER_TOKEN,
            self.features,
            self.api.is_batch(body),
            share_key(edge, self.request, body),
            self.api.max_answer_tokens(body),
            self.api.user_text(body) if edge.models.routes.reads_text else "",
        )
        served = edge.models.usable(self.request, adapters_by_model(edge.models.by_name.values()))
        return edge.models.routes.choose(body.model, body.models or (), facts, served)

    def _tried(self, chosen: ChosenRoute) -> list[str]:
        """An answer that outlives its connection cannot be judged first, as it belongs to a task that its name stands
        for: no model is asked whose answer may be discarded."""
        is_stream = bool(getattr(self.body, "stream", False))
        if chosen.cascades and outlives_connection(self.edge, self.request, is_stream=is_stream):
            return [name for name in chosen.models if name not in chosen.cascades]
        return list(chosen.models)

    def _asked_again(self, tried: Sequence[str]) -> Iterator[str]:
        """The first model that has passed the request on because of its brownout, once no other could take it; then the
        first without a shard, if requests wait for one to start."""
        for name, error in self.passed:
            if error.reason == ErrorReason.ERROR_REASON_BROWNOUT and name != tried[-1]:
                yield name
                break
        self.may_wait = self.edge.models.wait_for_shards
        for name, error in self.passed if self.may_wait else ():
            if error.reason == ErrorReason.ERROR_REASON_NO_SHARD_READY:
                yield name
                return

    async def _job(self, chosen: ChosenRoute, name: str) -> GenerationJob | None:
        """The request for a model; None: it cannot take it, which has been noted."""
        try:
            cascade = chosen.cascades.get(name)
            needs_logprobs = cascade is not None and "logprob" in cascade.tests.escalate_on
            features = self.features | _LOGPROBS if needs_logprobs else self.features
            model = self.edge.models.find_able(name, features, may_wait=self.may_wait)
            job = await self.api.make_job(self.edge, self.request, self.raw, self.body, model)
        except KvloomError as error:
            pass_on(self.passed, name, error)
            return None
        job.headers = {**job.headers, **route_headers(chosen, model.name, self.passed, self.discarded)}
        return job

    def _run(self, chosen: ChosenRoute, name: str, job: GenerationJob) -> RunAnswer:
        """How the answer of a model comes to its end."""
        if not chosen.successors(name) or not may_be_continued(job):
            return run_submission
        return ContinuedRun(self.request, chosen.continued[name], job, self._successors(chosen, name, job))

    async def _successors(self, chosen: ChosenRoute, name: str, job: GenerationJob) -> AsyncIterator[GenerationJob]:
        """The request for the models that may continue the answer of `job`. Two names may stand for one model, which is
        tried once."""
        tried = {job.model.name, *(self.edge.models.resolved_name(passed) for passed, _ in self.passed)}
        for other in chosen.successors(name):
            try:
                following = await self._job(chosen, other)
            except KvloomError:  # the first error is the one that the client gets
                continue
            if following is not None and following.model.name not in tried and may_be_continued(following):
                tried.add(following.model.name)
                following.deadline = job.deadline
                yield following

    async def _judged(self, cascade: Cascade, job: GenerationJob) -> web.StreamResponse | None:
        """Deliver the model's answer if it passes the tests; None: it does not, and was discarded."""
        edge = self.edge
        with edge.admission.collected.lease(edge.callers.caller_of(self.request)) as lease:
            held, objection = await hold_candidate(edge, self.request, job, cascade, lease)
            if objection is None:
                job.response_id = held.response_id
                run = HeldRun(held, self.request.writer.drain, job.deadline)
                return await self.api.generate(edge, self.request, self.permit, job, run)
        self.discarded.append((job.model.name, objection))
        return None
