"""Responses without an output: `generate: false` of a WebSocket. What follows on such a response has its input."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from edge_http.admission import AdmissionPermit
from edge_http.answers.kept_answer import response_in
from edge_http.answers.shape import formatter_of
from edge_http.edge import Edge
from edge_http.endpoints.answering import check_job_window, envelope_of
from edge_http.endpoints.generation_job import GenerationJob
from edge_http.formatting.usage import Usage
from edge_http.resume.response_name import new_response_id
from edge_http.submission import RunAnswer, run_submission
from edge_http.wire.headers import RESPONSE_ID
from edge_http.wire.message_request import MessageRequest, MessageStream

_NOTHING: Final = Usage(0, 0, 0)


async def prepare(
    edge: Edge,
    request: MessageRequest,
    permit: AdmissionPermit,  # noqa: ARG001
    job: GenerationJob,
    run: RunAnswer = run_submission,  # noqa: ARG001
) -> web.StreamResponse:
    """Answer with a response that has ended, and for which nothing was generated. It is stored as any other one. Raises
    KvloomError."""
    check_job_window(edge.models, job)
    name = new_response_id(job.id_prefix, edge.tag)
    formatter = formatter_of(job.shape, envelope_of(job, name), job.model.tokenizer)
    opening, ending = formatter.opening(0, 0), formatter.ending(lambda: _NOTHING, None)
    if job.keep is not None:
        await job.keep(response_in(ending[-1]), ())
    events = MessageStream(request, edge.config.max_buffered_bytes, edge.write_coalescer)
    events.begin({RESPONSE_ID: name})
    for event in (*opening, *ending):
        events.send(event, b"", b"")
    events.end()
    return events.response()
