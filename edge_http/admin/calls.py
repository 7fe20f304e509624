"""Calls methods of DirectoryService: a path, a query and a body become the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import grpc
import grpc.aio
import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from edge_http.admin.routes import AdminRoute
from edge_http.formatting.decoding import decode_body
from kvloom.errors import KvloomError, control_unavailable, invalid_argument
from kvloom.transport.grpc_errors import error_from_peer
from kvloom.v1 import directory_service_pb2, directory_service_pb2_grpc
from kvloom_common.transport.plain_messages import as_plain, fill

CALL_SECONDS: Final = 30.0


async def call_directory(
    channel: grpc.aio.Channel | None,
    route: AdminRoute,
    raw_path: str,
    query: Mapping[str, str],
    body: bytes,
    metadata: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """The response to a request of these, as JSON has it. `channel`: to control; None if it is away. Raises
    KvloomError."""
    wanted = request_of(route, raw_path, query, body)
    if channel is None:
        raise control_unavailable()
    stub = directory_service_pb2_grpc.DirectoryServiceStub(channel)
    try:
        return as_plain(await getattr(stub, route.method)(wanted, metadata=metadata, timeout=CALL_SECONDS))
    except grpc.aio.AioRpcError as error:
        raise as_caller_knows(error_from_peer(error) or control_unavailable(), route) from error
    except grpc.aio.UsageError as error:  # the channel was closed, since control has gone
        raise control_unavailable() from error


_DECODER = msgspec.json.Decoder(dict[str, Any])


def request_of(route: AdminRoute, raw_path: str, query: Mapping[str, str], body: bytes) -> Any:
    """Raises KvloomError (INVALID_ARGUMENT)."""
    request = getattr(directory_service_pb2, f"{route.method}Request")()
    for name, text in query.items():
        if name not in route.query:
            raise invalid_argument(f"There is no parameter {name[:64]!r} here.", name[:64])
        fill(request, {name: _from_query(request.DESCRIPTOR.fields_by_name[name], text)})
    if route.body is not None:
        given = decode_body(_DECODER, body) if body else {}
        target = getattr(request, route.body) if route.body else request
        if route.body:
            target.SetInParent()
        fill(target, given)
        if route.http_method == "PATCH":
            request.update_mask.paths.extend(_changed(given))
    _set_ids(request, route, raw_path)
    return request


def as_caller_knows(error: KvloomError, route: AdminRoute) -> KvloomError:
    """The same error, whose field is that of the body."""
    error.field = error.field.removeprefix(f"{route.body}.") if route.body else error.field
    return error


def _changed(given: Mapping[str, Any]) -> list[str]:
    """The paths of an update mask. Of limits those that are given, and all of them if none is."""
    paths: list[str] = []
    for name, value in given.items():
        if name == "id":
            continue  # it is that of the path
        if name == "limits" and isinstance(value, dict) and value:
            paths += [f"limits.{limit}" for limit in value]
        else:
            paths.append(name)
    return paths


def _set_ids(request: Message, route: AdminRoute, raw_path: str) -> None:
    """Sets in the request what the path says, which nothing else may contradict."""
    segments = zip(route.path.split("/"), raw_path.split("/"), strict=True)
    names = {wanted.strip("{}"): unquote(given) for wanted, given in segments if wanted.startswith("{")}
    for place, pattern in route.ids:
        *parents, field = place.split(".")
        target = request
        for parent in parents:
            target = getattr(target, parent)
        value = pattern.format(**names)
        if getattr(target, field) not in ("", value):
            raise invalid_argument(f"{field} is another one than that in the path.", field)
        setattr(target, field, value)


def _from_query(field: FieldDescriptor, text: str) -> Any:
    if field.type == FieldDescriptor.TYPE_BOOL and text in ("true", "false"):
        return text == "true"
    if field.type == FieldDescriptor.TYPE_INT32 and text.isdecimal() and len(text) < 10:
        return int(text)
    return text
