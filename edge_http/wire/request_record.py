"""Notes facts of an HTTP request while it is served: for its lines in the logs, of which one is written when it has
ended, and for the headers that every response has."""

from __future__ import annotations

import time
from typing import Final, Protocol

import structlog
from aiohttp import web

from edge_http.formatting.limit_headers import anthropic_limit_headers, openai_limit_headers
from edge_http.wire.cors import Cors
from edge_http.wire.headers import LIMITED_BY, PROCESSING_MS, REQUEST_ID, is_anthropic, request_id, traceparent
from edge_http.wire.request_callers import RequestCallers
from kvloom.errors import KvloomError
from kvloom.limits_state import LimitsState, limits_state_from_proto
from kvloom.v1 import error_reason_pb2 as pb
from kvloom_common.process.access_log import AccessLog
from kvloom_common.process.request_context import RequestContext, current_request, request_fields

log = structlog.get_logger()

CLIENT_CLOSED_REQUEST: Final = 499
"""nginx's status for a request whose client disconnected before it had the whole response."""
MAX_PATH_CHARS: Final = 256
MAX_METHOD_CHARS: Final = 16


class AnswerFigures(Protocol):
    """The facts that a line tells about the answer of a model."""

    error: KvloomError | None
    num_output_tokens: int
    request_context: RequestContext | None
    limited_by: str

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_events(self) -> int: ...

    @property
    def limits(self) -> pb.LimitsState | None: ...


class RequestRecord:
    """The record of one request. Nothing is computed before a line is written."""

    __slots__ = (
        "_callers",
        "_cors",
        "_request",
        "_started_at",
        "answer",
        "error_type",
        "limits",
        "model",
        "response_id",
    )

    def __init__(self, request: web.BaseRequest, callers: RequestCallers, cors: Cors | None = None) -> None:
        self._request = request
        self._callers = callers
        self._cors = cors
        self._started_at = time.monotonic()
        self.response_id = ""
        self.model = ""
        self.answer: AnswerFigures | None = None
        """These three are set when a model answers the request."""
        self.limits: pb.LimitsState | None = None
        """Those of a call that no model answers."""
        self.error_type = ""
        """The reason of the error that the client was sent; "" if there was none."""

    @property
    def elapsed_seconds(self) -> float:
        """Since the request's head arrived."""
        return time.monotonic() - self._started_at

    def end(self, status: int) -> None:  # noqa: ARG002  (traces have it)
        """Let go of the answer, which refers to this record: otherwise only the garbage collector would free them, and
        a connection would keep its last answer until its next request."""
        self.answer = None

    def log_fields(self) -> dict[str, str]:
        request = self._request
        tenant = self._callers.caller_of(request)
        return request_fields(self.response_id, request_id(request), traceparent(request), tenant)

    def response_headers(self) -> dict[str, str]:
        """The headers that every response to the request has, streams included."""
        headers = {
            REQUEST_ID: request_id(self._request),
            PROCESSING_MS: str(int((time.monotonic() - self._started_at) * 1e3)),
        }
        if self._callers.have_tenants and self.answer is not None:
            self._add_limits(headers, self.answer)
        elif self.limits is not None:
            headers.update(self._limit_headers(limits_state_from_proto(self.limits)))
        if self._cors is not None:
            headers.update(self._cors.response_headers(self._request))
        return headers

    def _add_limits(self, headers: dict[str, str], answer: AnswerFigures) -> None:
        """Adds the headers that tell a caller of its limits, as its API writes them; none if it has no limits."""
        error, message = answer.error, answer.limits
        state = None if error is None else error.limits
        if state is None:
            if answer.limited_by:
                headers[LIMITED_BY] = answer.limited_by
            if message is None:
                return
            state = limits_state_from_proto(message)
        headers.update(self._limit_headers(state))

    def _limit_headers(self, state: LimitsState) -> dict[str, str]:
        if is_anthropic(self._request):
            return anthropic_limit_headers(state, time.time())
        return openai_limit_headers(state)

    def log_end(self, access_log: AccessLog, route: str, status: int, num_body_bytes: int | None) -> None:
        """Write the line of the access log, if it is wanted. `num_body_bytes` is None for a stream, of which the events
        are counted instead."""
        if not access_log.wants(request_id(self._request)):
            return
        request, answer = self._request, self.answer
        fields: dict[str, object] = {
            "method": request.method[:MAX_METHOD_CHARS],
            "path": request.rel_url.raw_path[:MAX_PATH_CHARS],
            "route": route,
            "status": status,
            "duration_seconds": round(time.monotonic() - self._started_at, 6),
            "num_request_bytes": request.content.total_bytes,
        }
        if num_body_bytes is not None:
            fields["num_response_bytes"] = num_body_bytes
        error_type = self.error_type
        if answer is not None:
            fields["model"] = self.model
            fields["num_prompt_tokens"] = answer.num_prompt_tokens
            fields["num_output_tokens"] = answer.num_output_tokens
            if num_body_bytes is None:
                fields["num_events"] = answer.num_events
            if not error_type and answer.error is not None:
                error_type = answer.error.reason_name.lower()
        if error_type:
            fields["error_type"] = error_type
        log.info("http_request_ended", **self.log_fields(), **fields)


def begin_answer(response_id: str, model: str, answer: AnswerFigures) -> None:
    """Note which answer this task's request got, for its log lines."""
    record = current_request()
    if isinstance(record, RequestRecord):
        record.response_id, record.model, record.answer = response_id, model, answer
        answer.request_context = record


def note_limits(limits: pb.LimitsState) -> None:
    """Note what is left of the caller's limits, of this task's call that no model answers."""
    record = current_request()
    if isinstance(record, RequestRecord):
        record.limits = limits


def seconds_since_arrival() -> float:
    """Since the head of this task's request arrived; 0 where the task has none."""
    record = current_request()
    return record.elapsed_seconds if isinstance(record, RequestRecord) else 0.0


def log_refused_connection(access_log: AccessLog, status: int, error: KvloomError) -> None:
    """Write the line of a request that cannot be named, because its head is malformed or incomplete."""
    if access_log.is_on:
        log.info(
            "http_request_ended",
            method="",
            path="",
            route="connection",
            status=status,
            error_type=error.reason_name.lower(),
        )
