"""Describes the paths of administrators in the OpenAPI document, with the types of messages as JSON has them."""

from __future__ import annotations

import functools
from typing import Any, Final

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from edge_http.admin.handler import administer
from edge_http.admin.routes import ADMIN_ROUTES, AdminRoute
from edge_http.openapi.route import Route, Success
from edge_http.wire.headers import REQUEST_ID
from kvloom.v1 import directory_service_pb2

_SCALARS: Final[dict[int, Any]] = {
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_ENUM: str,
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_DOUBLE: float,
}


@functools.cache
def type_of(message: Descriptor) -> Any:
    """A type with the fields of a message, none of which is required."""
    return msgspec.defstruct(
        message.name,
        [(field.name, _type_of_field(field), msgspec.UNSET) for field in message.fields],
        module=__name__,
        forbid_unknown_fields=True,
    )


def _type_of_field(field: FieldDescriptor) -> Any:
    message = field.message_type
    if message is None:
        kind = _SCALARS.get(field.type, int)
        return list[kind] if field.is_repeated else kind
    if message.GetOptions().map_entry:
        return dict[str, _type_of_field(message.fields_by_name["value"])]  # pyrefly: ignore[invalid-annotation]
    kind = type_of(message)
    return list[kind] if field.is_repeated else kind


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
