"""Serves what all endpoints that embed share: from the body of a request to the model that takes it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.answering import deliver_whole, read_prompt_body
from edge_http.endpoints.embedding_body import EmbeddingJob, embedding_body
from edge_http.endpoints.model_choice import NamesModels, pass_on, route_headers, share_key
from edge_http.formatting.body_fields import FieldRules
from edge_http.offered_models import CROSS_ENCODE, EMBED, OfferedModels
from edge_http.resume.idempotent_answers import WholeBody
from edge_http.resume.response_name import ResponseName, new_response_id
from edge_http.wire.body import digest_of
from edge_http.wire.request_callers import credential_digest
from edge_http.wire.request_headers import headers_of
from kvloom.errors import KvloomError
from kvloom_common.limits.byte_budget import ByteLease
from kvloom_common.models.model_routes import BYTES_PER_TOKEN, ChosenRoute, RouteFacts
from kvloom_common.models.served_model import ServedModel
from kvloom_common.models.succession import error_to_report, fallback_models

Body = TypeVar("Body", bound=NamesModels)


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingApi(Generic[Body]):
    """How the requests of an API are read. `decode` and `make_job` raise KvloomError."""

    name: str
    """Part of what an idempotency key stands for."""
    id_prefix: str
    """The response's id begins with it, e.g. "embd-"."""
    use: str
    """The capability that a model needs besides that to embed: "rerank" or "score". "": none, because its vectors are
    compared by the client, also with those of other requests."""
    decode: Callable[[bytes, FieldRules, Mapping[str, str]], Body]
    make_job: Callable[[Edge, web.BaseRequest, Body, ServedModel], Awaitable[EmbeddingJob]]
    """Validates the body and tokenizes it for a model."""
    user_text: Callable[[Body], str]
    """Returns the text that routes take for the last message of the user."""


async def serve_embedding(edge: Edge, request: web.BaseRequest, api: EmbeddingApi[Body]) -> web.StreamResponse:
    """Serve a POST that embeds. Raises KvloomError while nothing has been sent."""
    caller = edge.callers.caller_of(request)
    with edge.admission.admit(caller) as permit:
        with edge.admission.bodies.lease(caller) as lease:
            raw = await read_prompt_body(edge, request, lease)
            body = api.decode(raw, edge.fields, request.headers)
            edge.models.check_requested(request, body.model, body.models)
            job = None
            if not edge.models.routes.is_needed(body.model, body.models, edge.models.by_name, is_answer=False):
                job = await api.make_job(edge, request, body, edge.models.find_embedding(body.model, api.use))
        response_id = new_response_id(api.id_prefix, edge.tag)
        key = headers_of(request).idempotency_key
        name = None
        if key:
            name = ResponseName(response_id, credential_digest(request), caller, key, api.name + digest_of(raw))
        if job is not None:
            make = functools.partial(_single_body, edge, request, api, body, job, response_id)
        else:
            chosen = _choose(edge, request, api, body, len(raw))
            make = functools.partial(_routed_body, edge, request, api, body, chosen, response_id)
        return await deliver_whole(edge, request, permit, name, make)


async def _single_body(
    edge: Edge,
    request: web.BaseRequest,
    api: EmbeddingApi[Body],
    body: Body,
    job: EmbeddingJob,
    response_id: str,
    lease: ByteLease,
) -> WholeBody:
    """Embed with the model that is named, or with the one that succeeds it if it has just been withdrawn. Raises
    KvloomError."""
    try:
        return await embedding_body(edge, request, job, response_id, lease)
    except KvloomError as error:
        passed = [(body.model, error)]
        chosen = ChosenRoute(list(fallback_models(passed, edge.models.by_name)), body.model)
        if not chosen.models:
            raise
    lease.resize(0)
    return await _routed_body(edge, request, api, body, chosen, new_response_id(api.id_prefix, edge.tag), lease)


def _choose(
    edge: Edge, request: web.BaseRequest, api: EmbeddingApi[Body], body: Body, num_body_bytes: int
) -> ChosenRoute:
    """The models to try. Raises KvloomError (INVALID_ARGUMENT)."""
    more = body.models or ()
    able = {model.name for model in edge.models.by_name.values() if _may_embed(edge.models, model, api.use)}
    able = sorted(edge.models.usable(request, able))
    if not api.use:
        edge.models.routes.check_comparable(body.model, more, able, edge.models.resolved_name)
    facts = RouteFacts(
        num_body_bytes // BYTES_PER_TOKEN,
        frozenset(),
        is_batch=False,
        share_key=share_key(edge, request, body),
        user_text=api.user_text(body) if edge.models.routes.reads_text else "",
        is_answer=False,
    )
    return edge.models.routes.choose(body.model, more, facts, able)


def _may_embed(models: OfferedModels, model: ServedModel, use: str) -> bool:
    info = models.info(model.name)
    if model.adapter is not None or info is None:
        return False
    if CROSS_ENCODE in info.capabilities:
        return bool(use)
    return {EMBED, use or EMBED}.issubset(info.capabilities)


async def _routed_body(
    edge: Edge,
    request: web.BaseRequest,
    api: EmbeddingApi[Body],
    body: Body,
    chosen: ChosenRoute,
    response_id: str,
    lease: ByteLease,
) -> WholeBody:
    """Let the first of the models that can do so take the request. Raises `error_to_report` if none can, or a
    KvloomError for which another model would not do better."""
    # All attempts together have the time of one.
    deadline = asyncio.get_running_loop().time() + edge.request_timeout_seconds
    passed: list[tuple[str, KvloomError]] = []
    for name in itertools.chain(chosen.models, fallback_models(passed, edge.models.by_name)):
        if name in chosen.cascades:  # there is no answer to judge, so it goes to the model that is not judged
            continue
        try:
            model = edge.models.find_embedding(name, api.use)
            edge.models.find_able(name, ())
            job = await api.make_job(edge, request, body, model)
            job.headers, job.deadline = route_headers(chosen, model.name, passed), deadline
            # The name of a request that has just been cancelled may be in use still.
            attempt_id = new_response_id(api.id_prefix, edge.tag) if passed else response_id
            return await embedding_body(edge, request, job, attempt_id, lease)
        except KvloomError as error:
            pass_on(passed, name, error)
            lease.resize(0)  # the vectors that it had got
    if not passed:  # "auto", and there is no model
        edge.models.find_usable(request, body.model)
    raise error_to_report(passed)
