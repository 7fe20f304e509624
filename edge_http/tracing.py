"""The edge's spans of requests. Each is the parent of what the other processes say of the request."""

from __future__ import annotations

import secrets
import time

from aiohttp import web

from edge_http.answers.answer import EdgeAnswer
from edge_http.wire.cors import Cors
from edge_http.wire.headers import request_id, traceparent
from edge_http.wire.request_callers import RequestCallers
from edge_http.wire.request_record import CLIENT_CLOSED_REQUEST, MAX_METHOD_CHARS, RequestRecord
from kvloom.v1.generation_pb2 import FINISH_REASON_CONTENT_FILTER
from kvloom.v1.router_service_pb2 import GenerateRequest
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from kvloom_common.process.request_context import current_request, request_fields
from kvloom_common.tracing import attributes as names
from kvloom_common.tracing.spans import Span, Value
from kvloom_common.tracing.trace_context import TraceContext, is_drawn, parse_traceparent
from kvloom_common.tracing.tracer import Tracer


class EdgeTracing:
    """Makes the records of requests whose ends become spans."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def new_record(
        self, request: web.BaseRequest, route: str, callers: RequestCallers, cors: Cors | None
    ) -> TracedRecord:
        """Begin the span of a request: in its client's trace, or in one of its own."""
        sent = traceparent(request)
        parent = parse_traceparent(sent) if sent else None
        if parent is None:
            trace_id = secrets.randbits(128) or 1
            parent = TraceContext(trace_id, 0, is_sampled=False)
        is_sampled = parent.is_sampled or is_drawn(parent.trace_id, self.tracer.sample_share)
        context = TraceContext(parent.trace_id, secrets.randbits(64) or 1, is_sampled)
        return TracedRecord(self.tracer, context, parent.span_id, request, route, callers, cors)

    def passed_on(self, request: web.BaseRequest, wanted: GenerateRequest) -> str:
        """Return the trace context for the router, and note whose conversation the request continues."""
        record = current_request()
        if not isinstance(record, TracedRecord):
            return traceparent(request)
        record.session, record.user = wanted.session_key, wanted.safety_identifier
        return record.context.header


class TracedRecord(RequestRecord):
    """The record of a request, of which a span is written when it ends."""

    __slots__ = ("_parent_id", "_route", "_tracer", "context", "session", "user")

    def __init__(
        self,
        tracer: Tracer,
        context: TraceContext,
        parent_id: int,
        request: web.BaseRequest,
        route: str,
        callers: RequestCallers,
        cors: Cors | None,
    ) -> None:
        super().__init__(request, callers, cors)
        self._tracer = tracer
        self.context = context
        self._parent_id = parent_id
        self._route = route
        self.session = self.user = ""

    def log_fields(self) -> dict[str, str]:
        request = self._request
        tenant = self._callers.caller_of(request)
        return request_fields(self.response_id, request_id(request), self.context.header, tenant)

    def end(self, status: int) -> None:
        now = time.time()
        began_at = now - self.elapsed_seconds
        attributes: dict[str, Value] = {
            names.HTTP_METHOD: self._request.method[:MAX_METHOD_CHARS],
            names.HTTP_ROUTE: self._route,
            names.HTTP_STATUS: status,
            names.REQUEST_ID: request_id(self._request),
        }
        operation = names.OPERATIONS.get(self._route, "")
        error_type, answer = self.error_type, self.answer
        ttft_seconds: float | None = None
        is_filtered = False
        if answer is not None:
            attributes |= {
                names.PROVIDER: names.PROVIDER_KVLOOM,
                names.REQUEST_MODEL: self.model,
                names.RESPONSE_ID: self.response_id,
                names.INPUT_TOKENS: answer.num_prompt_tokens,
                names.OUTPUT_TOKENS: answer.num_output_tokens,
            }
            if not error_type and answer.error is not None:
                error_type = answer.error.reason_name.lower()
            if isinstance(answer, EdgeAnswer):
                reasons = [finish.reason for finish in answer.finishes.values()]
                is_filtered = FINISH_REASON_CONTENT_FILTER in reasons
                attributes[names.FINISH_REASONS] = [FINISH_REASON_NAMES[reason] for reason in reasons]
                if answer.first_token_at is not None:
                    ttft_seconds = attributes[names.TTFT] = answer.first_token_at - self._started_at
        known = {
            names.OPERATION: operation,
            names.TENANT: self._callers.caller_of(self._request),
            names.SESSION: self.session,
            names.CONVERSATION: self.session,
            names.USER: self.user,
            names.ERROR_TYPE: error_type,
        }
        attributes |= {name: value for name, value in known.items() if value}
        is_refused = status in (web.HTTPTooManyRequests.status_code, web.HTTPServiceUnavailable.status_code)
        self._tracer.write(
            Span(
                f"{operation} {self.model}" if operation and self.model else f"{self._request.method} {self._route}",
                self.context,
                self._parent_id,
                began_at,
                now,
                attributes,
                kind="server",
                error=error_type if status >= 500 or (status < 400 and error_type) else "",
                ttft_seconds=ttft_seconds,
                is_notable=is_refused or is_filtered or status == CLIENT_CLOSED_REQUEST,
            )
        )
        super().end(status)
