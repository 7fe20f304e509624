"""GET /openapi.json, as bytes that are made once."""

from __future__ import annotations

import asyncio
import functools

from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.health import VERSION
from edge_http.formatting.json_bytes import encode_json
from edge_http.openai.response_objects import ErrorBody
from edge_http.openapi.document import openapi_document
from edge_http.server.operations import OPERATIONS


async def openapi_json(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG001
    edge.check_docs()
    # The first request makes the document, which takes some hundredths of a second.
    body = await asyncio.to_thread(
        document_bytes,
        needs_key=edge.callers.needs_key,
        has_tenants=edge.callers.have_tenants,
        root_path=edge.config.root_path,
    )
    return web.Response(body=body, content_type="application/json")


@functools.cache
def document_bytes(*, needs_key: bool, has_tenants: bool = False, root_path: str = "") -> bytes:
    operations = OPERATIONS
    if has_tenants:
        # Only here, because a fabric without tenants needs nothing of it.
        from edge_http.admin.operations import ADMIN_OPERATIONS

        operations = (*OPERATIONS, *ADMIN_OPERATIONS)
    return encode_json(openapi_document(operations, VERSION, ErrorBody, needs_key=needs_key, root_path=root_path))
