"""The whole OpenAPI document."""

from __future__ import annotations

import http
import re
from collections.abc import Sequence
from typing import Any, Final

from edge_http.openapi.parameters import EVERY_ERROR, EVERY_RESPONSE, PARAMETERS, RESPONSE_HEADERS
from edge_http.openapi.route import EVENT_STREAM, Route, Success
from edge_http.openapi.schemas import schemas_of

Json = dict[str, Any]

_IN_PATH: Final = re.compile(r"\{(\w+)\}")
_BODY_ERRORS: Final = (400, 408, 413, 415)
_ABOUT: Final = (
    "Any client library of OpenAI works with this server's /v1. Errors have OpenAI's shape; their `code` says what "
    "happened. Fields that are not listed pass if they are hints, and are refused by name if they would change the "
    "answer. APIs of OpenAI that are not listed (audio, images, assistants and others) are refused with 501 "
    "`not_implemented`."
)
_SECURITY_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}


def openapi_document(
    operations: Sequence[Route], version: str, error: Any, *, needs_key: bool, root_path: str = ""
) -> Json:
    """`error` is the type of errors' bodies for operations without one of their own. `needs_key`: requests without an
    API key are refused. `root_path`: the path below which the server is reached."""
    types = {error} | {kind for operation in operations for kind in _types_of(operation)}
    wanted = sorted(types, key=lambda kind: (kind.__name__, kind.__module__))
    schemas, components = schemas_of(wanted)
    refs = dict(zip(wanted, schemas, strict=True))
    paths: Json = {}
    for operation in operations:
        about = _operation(operation, refs, refs[operation.error or error], needs_key=needs_key)
        paths.setdefault(operation.path, {})[operation.method.lower()] = about
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvloom", "version": version, "description": _ABOUT},
        "servers": [{"url": f"{root_path}/"}],
        "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for operation in operations)],
        "paths": paths,
        "components": {
            "schemas": components,
            "parameters": PARAMETERS,
            "headers": RESPONSE_HEADERS,
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


def _types_of(operation: Route) -> list[Any]:
    kinds = [operation.body, operation.error, *(answer.body for answer in operation.answers)]
    return [kind for kind in kinds if kind is not None]


def _operation(operation: Route, refs: dict[Any, Json], error: Json, *, needs_key: bool) -> Json:
    about: Json = {"operationId": operation.id, "tags": [operation.tag], "summary": operation.summary}
    if operation.description:
        about["description"] = operation.description
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _IN_PATH.findall(operation.path)
    ]
    named = [{"$ref": f"#/components/parameters/{name}"} for name in operation.parameters]
    if in_path or named:
        about["parameters"] = [*in_path, *named]
    if operation.body is not None:
        content: Json = {"schema": refs[operation.body]}
        if operation.examples:
            content["examples"] = {
                title: {"summary": title, "value": value} for title, value in operation.examples.items()
            }
        about["requestBody"] = {"required": True, "content": {"application/json": content}}
    about["responses"] = _responses(operation, refs, error)
    keys = [{name: []} for name in _SECURITY_SCHEMES]
    about["security"] = [] if operation.is_open else keys if needs_key else [*keys, {}]
    return about


def _responses(operation: Route, refs: dict[Any, Json], error: Json) -> Json:
    responses: Json = {}
    for answer in operation.answers:
        shown = responses.setdefault(str(answer.status), {"description": answer.description, "headers": {}})
        shown["headers"] |= _headers((*EVERY_RESPONSE, *operation.headers, *answer.headers))
        if answer.status not in (http.HTTPStatus.NO_CONTENT, http.HTTPStatus.SWITCHING_PROTOCOLS):
            shown.setdefault("content", {})[answer.content_type] = _content(answer, refs)
    statuses = {*operation.errors, *(_BODY_ERRORS if operation.body is not None else ())}
    statuses |= set() if operation.is_open else {401}
    content = {"application/json": {"schema": error}}
    error_headers = _headers((*EVERY_ERROR, *operation.headers))
    for status in sorted(statuses):
        about = {"description": _phrase(status), "headers": error_headers, "content": content}
        responses.setdefault(str(status), about)
    responses["default"] = {"description": "An error.", "headers": error_headers, "content": content}
    return responses


def _content(answer: Success, refs: dict[Any, Json]) -> Json:
    if answer.content_type == EVENT_STREAM:
        # OpenAPI 3.1 has no word for streams. This is one event as OpenAPI 3.2 describes it.
        data: Json = {"type": "string", "contentMediaType": "application/json"}
        if answer.body is not None:
            data["contentSchema"] = refs[answer.body]
        text = "One server-sent event. Its data is JSON, or `[DONE]` at the end of the stream."
        names = {name: {"type": "string"} for name in ("event", "id")}
        event = {
            "type": "object",
            "properties": {"data": {"anyOf": [data, {"const": "[DONE]"}]}, **names},
            "required": ["data"],
        }
        return {"schema": {"description": text, **event}}
    return {"schema": {"type": "string"} if answer.body is None else refs[answer.body]}


def _headers(names: Sequence[str]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _phrase(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:  # Anthropic's 529
        return "Overloaded"
