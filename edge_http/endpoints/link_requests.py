"""The requests to the router that a job makes, one for each prompt."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.objectives import TimedJob
from edge_http.openai.prompt import PromptInput
from edge_http.wire.headers import RECEIPT, request_id, traceparent
from edge_http.wire.request_headers import NO_WISHES
from kvloom.errors import unsupported
from kvloom.router_link.link import LinkRequest
from kvloom.v1.router_service_pb2 import Submit


def link_requests(
    edge: Edge,
    request: web.BaseRequest,
    job: TimedJob,
    prompts: Sequence[PromptInput],
    name: str,
    timeout_seconds: float,
) -> list[LinkRequest]:
    """The requests for the job's prompts, whose response has the id `name`. Raises KvloomError."""
    wanted, adapter = job.wanted, job.model.adapter
    wanted.model, wanted.timeout_seconds = job.model.name, timeout_seconds
    if adapter is not None:
        wanted.adapter_checksum = adapter.checksum
    asked = job.asked
    if asked is not NO_WISHES:
        wanted.MergeFrom(asked.wanted)
        if wanted.receipt and edge.receipt_keys is None:
            raise unsupported("There are no receipts here (router.receipts.enabled).", RECEIPT)
    submit = Submit(
        request=wanted,
        tenant=edge.callers.caller_of(request),
        traceparent=traceparent(request) if edge.tracing is None else edge.tracing.passed_on(request, wanted),
        client_request_id=request_id(request),
        key_id=edge.callers.key_id_of(request),
        has_fallback_model=job.has_fallback_model,
    )
    return [_of_prompt(submit, prompt, name, number, len(prompts)) for number, prompt in enumerate(prompts)]


def _of_prompt(submit: Submit, prompt: PromptInput, name: str, number: int, count: int) -> LinkRequest:
    own = submit
    if count > 1:
        own = Submit()
        own.CopyFrom(submit)
    own.request.request_id = name if count == 1 else f"{name}.{number}"
    own.prompt_text = prompt.text
    if prompt.images:
        own.request.images.extend(prompt.images)
    return LinkRequest(own, prompt.token_ids)
