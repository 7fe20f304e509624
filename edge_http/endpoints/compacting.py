"""Compacts conversations: POST /v1/responses/compact, and `context_management` of a response, before it is answered.

The model that answers also writes the summary, in a request of its own, which is limited, screened and metered like any
other."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.answering import collected_within
from edge_http.endpoints.generation_job import GenerationJob
from edge_http.endpoints.ownership import owner_of
from edge_http.endpoints.response_job import CompactedInput, input_of, response_job, seal_of
from edge_http.endpoints.routed import GenerationApi, serve_generation
from edge_http.endpoints.shortening import MAX_SUMMARY_TOKENS
from edge_http.endpoints.stored_input import StoredInput, stored_of
from edge_http.endpoints.summarizing import SummaryResponse
from edge_http.formatting.json_bytes import encode_json
from edge_http.openai.responses.compaction import (
    compacted,
    last_turn,
    request_for_summary,
    user_messages,
)
from edge_http.openai.responses.file_search import FileSearch
from edge_http.openai.responses.requests import CompactBody, ResponsesBody, StoredResponsesBody, decode_compact
from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom_common.models.model_routes import BYTES_PER_TOKEN
from kvloom_common.models.served_model import ServedModel

WINDOW_SHARE: Final = 0.75
"""The part of a model's window from which on a conversation is compacted, if the request says no threshold."""
SAID_SHARE: Final = 0.25
"""The words of the user in compacted turns are kept up to this part of the threshold."""


async def compact(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    """Serve POST /v1/responses/compact."""
    return await serve_generation(edge, request, _API)


async def managed_job(
    edge: Edge,
    request: web.BaseRequest,
    raw: bytes,
    body: ResponsesBody,
    model: ServedModel,
    stored: StoredInput | None = None,
    search: FileSearch | None = None,
) -> GenerationJob:
    """The job of a response, whose conversation is compacted before if its `context_management` says so. What it
    cannot make smaller is left as it is. `search`: what was found in files. Raises KvloomError."""
    job = await response_job(edge, request, raw, body, model, stored, search=search)
    if not body.context_management:
        return job
    window = edge.models.window(model.name)
    threshold = body.context_management[0].compact_threshold or int(window * WINDOW_SHARE)
    if not threshold or job.prompt_sizes[0] < threshold:
        return job
    earlier, given, _ = input_of(edge, request, body.input, stored)
    items = [*earlier, *([_user(given)] if isinstance(given, str) else given)]
    first = last_turn(items)
    before, turn = items[:first], items[first:]
    if not before:
        return job
    summarizing = await _summarizing_job(edge, request, raw, body, model, before)
    if summarizing is None:
        return job
    response = msgspec.json.decode(await collected_within(edge, request, summarizing), type=SummaryResponse)
    max_chars = int(threshold * SAID_SHARE) * BYTES_PER_TOKEN
    part = compacted(before, turn, response.text, max_chars)
    item = seal_of(edge, request).item(_new_id(), part)
    return await response_job(
        edge, request, raw, body, model, stored, part=CompactedInput(part.items(), item), search=search
    )


async def _summarizing_job(
    edge: Edge,
    request: web.BaseRequest,
    raw: bytes,
    body: ResponsesBody,
    model: ServedModel,
    items: Sequence[msgspec.Raw],
) -> GenerationJob | None:
    """The job whose answer is a summary of the items; None: they leave no room for one in the model's window. Raises
    KvloomError."""
    asked = ResponsesBody(
        model=body.model,
        input=[*items, request_for_summary()],
        instructions=body.instructions,
        temperature=0.0,
        max_output_tokens=MAX_SUMMARY_TOKENS,
        service_tier=body.service_tier,
        guardrails=body.guardrails,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
    )
    try:
        job = await response_job(edge, request, raw, asked, model)
    except KvloomError as error:
        if error.reason != ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED:
            raise
        return None
    if window := edge.models.window(model.name):
        room = window - job.prompt_sizes[0]
        if room <= 0:
            return None
        job.stop.max_tokens = min(room, MAX_SUMMARY_TOKENS)
    return job


async def _compacting_job(
    edge: Edge, request: web.BaseRequest, raw: bytes, body: CompactBody, model: ServedModel
) -> GenerationJob:
    stored: StoredInput | None = None
    given: str | Sequence[msgspec.Raw] = body.input or []
    if edge.orchestrator is not None:
        named = StoredResponsesBody(
            model=body.model, input=body.input or [], previous_response_id=body.previous_response_id
        )
        stored = await stored_of(edge.orchestrator, owner_of(edge, request), named, edge.fetcher)
    earlier, rest, _ = input_of(edge, request, given, stored)
    items = [*earlier, *([_user(rest)] if isinstance(rest, str) else rest)]
    asked = ResponsesBody(
        model=body.model,
        input=given,  # pyrefly: ignore[bad-argument-type]
        instructions=body.instructions,
        service_tier=body.service_tier,
        guardrails=body.guardrails,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
    )
    job = await _summarizing_job(edge, request, raw, asked, model, items)
    if job is None:
        message = "The conversation leaves no room for a summary in the model's window. Compact an earlier part of it."
        raise KvloomError(ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED, message, field="input")
    job.rewrite = functools.partial(_compaction, edge, request, items)
    return job


def _compaction(edge: Edge, request: web.BaseRequest, items: Sequence[msgspec.Raw], answer: bytes) -> bytes:
    """The body of a compaction, out of that of the response that has the summary."""
    response = msgspec.json.decode(answer, type=SummaryResponse)
    part = compacted(items, (), response.text)
    item = seal_of(edge, request).item(_new_id(), part)
    return encode_json(
        {
            "id": response.id,
            "object": "response.compaction",
            "created_at": response.created_at or int(time.time()),
            "output": [*map(_shown, user_messages(items)), item],
            "usage": response.usage,
        }
    )


def _shown(raw: msgspec.Raw) -> dict[str, Any]:
    """A message of the user as an item of an output."""
    item: dict[str, Any] = msgspec.json.decode(raw)
    if isinstance(item.get("content"), str):
        item["content"] = [{"type": "input_text", "text": item["content"]}]
    named = {"id": item.get("id") or f"msg_{os.urandom(24).hex()}", "status": item.get("status") or "completed"}
    return {**item, "type": "message", **named}


def _user(text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({"type": "message", "role": "user", "content": text}))


def _new_id() -> str:
    return f"cmp_{os.urandom(24).hex()}"


def _decode(edge: Edge, request: web.BaseRequest, raw: bytes) -> CompactBody:
    has_state = edge.orchestrator is not None
    return decode_compact(raw, edge.config.max_messages, edge.fields, request.headers, has_state=has_state)


_API: Final[GenerationApi[CompactBody]] = GenerationApi(
    decode=_decode,
    make_job=_compacting_job,
    features=lambda _: frozenset(),
    max_answer_tokens=lambda _: MAX_SUMMARY_TOKENS,
    user_text=lambda _: "",
    is_batch=lambda body: body.service_tier == "flex",
)
