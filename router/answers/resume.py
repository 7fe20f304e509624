"""The RPCs of resumable answers: `Generate`, which begins one, and `Resume`."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote

import grpc

from kvloom.v1.router_service_pb2 import GenerateRequest, GenerateResponse, ResumeRequest, ResumeResponse
from router.answers.generate import REQUEST_ID_METADATA, explain, owner_metadata, wants_explanation
from router.answers.resumable_answers import ResumableAnswers
from router.caller_scope import TRUSTED, CallerScope, metadata_value, owner_of

REQUEST_ID_KEY: Final = "kvloom-request-id"
"""Its value is percent-encoded, like all values of the initial metadata."""
TOKEN_KEY: Final = "kvloom-resume-token"
ROUTER_KEY: Final = "kvloom-router"

Context = grpc.aio.ServicerContext[Any, Any]


async def serve_generate(
    answers: ResumableAnswers, request: GenerateRequest, context: Context, scope: CallerScope = TRUSTED
) -> None:
    """Begin an answer and read it. Raises KvloomError if it ends with an error."""
    answer = answers.begin(
        request,
        owner_of(context),
        metadata_value(context, "traceparent"),
        scope,
        metadata_value(context, REQUEST_ID_METADATA),
    )
    reader = answer.attach(answer.log.num_events)
    try:
        await context.send_initial_metadata(
            (
                (REQUEST_ID_KEY, quote(answer.name.request_id, safe="")),
                (TOKEN_KEY, answer.name.token),
                (ROUTER_KEY, quote(answers.router_id, safe="")),
                *owner_metadata(answers.address),
            )
        )
        answer.is_known_to_client = True
        await answer.follow(reader, context.write)
        if answer.first_start is not None and wants_explanation(context):
            explain(context, answer.first_start)
    finally:
        answer.detach(reader)


async def serve_resume(answers: ResumableAnswers, request: ResumeRequest, context: Context) -> None:
    """Raises KvloomError (NOT_FOUND, EVENTS_GONE, INVALID_ARGUMENT), and the error that the answer ends with."""
    answer = answers.find(request.request_id, request.resume_token, owner_of(context))
    reader = answer.attach(request.starting_after)
    answers.metrics.on_resumed(answer.log.num_events - request.starting_after)

    async def write(response: GenerateResponse) -> None:
        await context.write(ResumeResponse(response=response))

    try:
        # Sent before the first response: the client waits only briefly for the sign that the answer is here.
        await context.send_initial_metadata(())
        await answer.follow(reader, write)
    finally:
        answer.detach(reader)
