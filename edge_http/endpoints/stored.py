"""Responses that are stored: how they are kept, and how they are found again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from edge_http.admission import AdmissionPermit
from edge_http.answers.collected_answer import CollectedAnswer
from edge_http.answers.kept_answer import KeptAnswer, KeptChat
from edge_http.answers.shape import formatter_of, parsed_outputs
from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.edge import Edge
from edge_http.endpoints.answering import check_job_window, generate
from edge_http.endpoints.background import cancel_background, read_background
from edge_http.endpoints.forking import generation_json, give_seed
from edge_http.endpoints.generation_job import GenerationJob
from edge_http.endpoints.ownership import owner_of
from edge_http.endpoints.resume import cancel_response, resume_stream
from edge_http.endpoints.stored_input import StoredInput
from edge_http.formatting.response_formatter import Envelope
from edge_http.openai.responses.requests import StoredResponsesBody
from edge_http.orchestrator_link import OrchestratorLink
from edge_http.submission import RunAnswer, run_submission
from edge_http.wire.headers import RELAYED
from kvloom.v1.orchestrator_service_pb2 import KeepResponseRequest, Owner
from kvloom_common.limits.byte_budget import ByteBudget


async def keep_response(
    link: OrchestratorLink,
    owner: Owner,
    body: StoredResponsesBody,
    stored: StoredInput,
    job: GenerationJob,
    response: bytes,
    token_ids: Sequence[int],
) -> None:
    """Raises KvloomError."""
    # The prompt, and so a fork, must follow from what is stored, and the output from the tokens.
    has_more = stored.has_more or bool(job.prompts[0].images)  # whose contents may change
    can_fork = not (body.conversation_id or body.context_management or has_more or job.originals)
    await link.keep_response(
        KeepResponseRequest(
            owner=owner,
            response=response,
            input_items=map(bytes, stored.own_items),
            previous_response_id=stored.previous_response_id,
            conversation_id=body.conversation_id,
            generation=generation_json(job, token_ids) if can_fork and job.moderation is None else b"",
        )
    )


async def generate_stored(
    edge: Edge,
    request: web.BaseRequest,
    permit: AdmissionPermit,
    job: GenerationJob,
    run: RunAnswer = run_submission,
) -> web.StreamResponse:
    """Does what `generate` does for a job whose response may be stored, and may be generated in the background."""
    if job.begin is not None:
        check_job_window(edge.models, job)
        permit.release()
        permit.handed_over = True
        return await job.begin()
    if job.keep is None or not job.stream:
        return await generate(edge, request, permit, job, run)
    kept: Callable[..., StreamedAnswer] = KeptAnswer if job.shape.api == "responses" else _kept_chat(edge, job)
    return await generate(edge, request, permit, job, run, kept)


def _kept_chat(edge: Edge, job: GenerationJob) -> Callable[..., StreamedAnswer]:
    """Returns what makes the stream of a chat completion that is stored."""

    def make_twin(envelope: Envelope) -> CollectedAnswer:
        formatter = formatter_of(job.shape, envelope, job.model.tokenizer)
        most = edge.config.max_answer_bytes
        lease = ByteBudget(2 * most, "a stored answer").lease("")
        return CollectedAnswer(
            job.prompt_sizes, job.n, formatter, most, lease, parsed_outputs(job.shape, job.num_choices)
        )

    return functools.partial(KeptChat, make_twin)


def keeping_chat(
    link: OrchestratorLink, owner: Owner, raw: bytes, metadata: Mapping[str, Any] | None, user: str | None
) -> Any:
    """Returns a function that stores a chat completion with the messages of its body. `user`: whose it is."""
    more = {"metadata": metadata or {}, **({} if user is None else {"safety_identifier": user})}

    async def keep(response: bytes, _: Sequence[int]) -> None:
        completion = {**msgspec.json.decode(response, type=dict[str, msgspec.Raw]), **more}
        messages = msgspec.json.decode(raw, type=_Messages).messages
        await link.keep_response(
            KeepResponseRequest(owner=owner, response=msgspec.json.encode(completion), input_items=map(bytes, messages))
        )

    return keep


class _Messages(msgspec.Struct):
    messages: list[msgspec.Raw]


def keeping(
    link: OrchestratorLink, owner: Owner, body: StoredResponsesBody, stored: StoredInput, job: GenerationJob
) -> Any:
    """Returns a function that stores the response; None: it is not to be stored."""
    if not body.is_stored:
        return None
    give_seed(job)
    return functools.partial(keep_response, link, owner, body, stored, job)


async def get_response(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve GET /v1/responses/{id} and GET /v1/chat/completions/{id}: what is stored, or the rest of a stream."""
    path, _, object_id = request.path.rpartition("/")
    if edge.orchestrator is None or RELAYED in request.headers:
        return await resume_stream(edge, request)
    if request.query.get("stream", "").lower() == "true":
        background = await read_background(edge, request, object_id) if path == "/v1/responses" else None
        return await resume_stream(edge, request) if background is None else background
    operation = "getResponse" if path == "/v1/responses" else "getChatCompletion"
    answer = await edge.orchestrator.operate(owner_of(edge, request), operation, [object_id])
    return web.Response(body=answer, content_type="application/json")


async def cancel_stored(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/responses/{id}/cancel: of a background response, or of a resumable stream."""
    return await cancel_background(edge, request) or await cancel_response(edge, request)
