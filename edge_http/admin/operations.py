"""Describes the paths of administrators in the OpenAPI document: the types are those of the messages."""

from __future__ import annotations

from typing import Final

from edge_http.admin.handler import administer
from edge_http.admin.message_types import type_of
from edge_http.admin.routes import ADMIN_ROUTES, AdminRoute
from edge_http.openapi.route import Route, Success
from edge_http.wire.headers import REQUEST_ID
from kvloom.v1 import directory_service_pb2


def _operation(route: AdminRoute) -> Route:
    request = directory_service_pb2.DESCRIPTOR.message_types_by_name[f"{route.method}Request"]
    response = directory_service_pb2.DESCRIPTOR.message_types_by_name[f"{route.method}Response"]
    body = None
    if route.body is not None:
        body = type_of(request.fields_by_name[route.body].message_type if route.body else request)
    return Route(
        path=route.path,
        method=route.http_method,
        handler=administer,
        scope="admin",
        has_head=False,
        id=route.method[0].lower() + route.method[1:],
        tag="Administration",
        summary=route.summary,
        description="Needs a key with the scope admin, in a fabric with tenants.",
        parameters=(*route.query, REQUEST_ID),
        body=body,
        answers=(Success("The answer of control.", type_of(response)),),
        errors=(400, 403, 404, 409, 503),
    )


ADMIN_OPERATIONS: Final[tuple[Route, ...]] = tuple(_operation(route) for route in ADMIN_ROUTES)
