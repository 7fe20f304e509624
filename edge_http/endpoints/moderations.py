"""POST /v1/moderations: which categories of the safety policy texts belong to."""

from __future__ import annotations

import os
from typing import Any, Final

from aiohttp import web

from edge_http.edge import Edge
from edge_http.formatting.moderation import model_of, result_objects
from edge_http.openai.requests import decode_moderation, moderation_texts
from edge_http.side_call import side_call
from edge_http.wire.body import read_json_body
from edge_http.wire.json_response import json_response
from kvloom.v1.router_service_pb2 import ModerateRequest, ModerateResponse

MAX_TEXTS: Final = 256
MAX_CHARS: Final = 2**20
"""The limit of the safety service (protos/kvloom/v1/safety_service.proto)."""


async def moderations(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:
    caller = edge.callers.caller_of(request)
    with edge.admission.admit(caller), edge.admission.bodies.lease(caller) as lease:
        raw = await read_json_body(request, edge.config, lease)
        texts = moderation_texts(decode_moderation(raw, edge.fields, request.headers), MAX_TEXTS, MAX_CHARS)
        async with side_call(edge, request, sum(map(len, texts))):
            answer = await edge.link.moderate(ModerateRequest(texts=texts))
    return json_response(_body(answer))


def _body(answer: ModerateResponse) -> dict[str, Any]:
    return {
        "id": f"modr-{os.urandom(12).hex()}",
        "model": model_of(answer),
        "results": result_objects(answer),
    }
