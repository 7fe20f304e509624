"""GET /openapi.json, which is made once, and so all routes of the API but those of administrators."""

from __future__ import annotations

import asyncio
import functools
from typing import Final

from aiohttp import web

from edge_http.edge import Edge
from edge_http.endpoints.health import VERSION
from edge_http.endpoints.page import check_docs
from edge_http.formatting.json_bytes import encode_json
from edge_http.openai.response_objects import ErrorBody, OpenApiDocument
from edge_http.openapi.document import openapi_document
from edge_http.openapi.route import Route, Success
from edge_http.operating.routes import OPERATING_ROUTES
from edge_http.server.routes import ROUTES


async def openapi_json(edge: Edge, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG001
    check_docs(edge)
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
    routes = API_ROUTES
    if has_tenants:
        # Only here, because a fabric without tenants needs nothing of it.
        from edge_http.admin.operations import ADMIN_OPERATIONS

        routes = (*API_ROUTES, *ADMIN_OPERATIONS)
    return encode_json(openapi_document(routes, VERSION, ErrorBody, needs_key=needs_key, root_path=root_path))


API_ROUTES: Final[tuple[Route, ...]] = (
    *ROUTES,
    *OPERATING_ROUTES,
    Route(
        path="/openapi.json",
        method="GET",
        handler=openapi_json,
        id="openapi",
        tag="Operation",
        summary="This document",
        answers=(Success("OpenAPI 3.1.", OpenApiDocument),),
        is_open=True,
        errors=(404,),
    ),
)
