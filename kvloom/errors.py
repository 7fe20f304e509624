"""The error catalogue: each reason's gRPC code, HTTP status and OpenAI type. This module imports no gRPC.

Every error that leaves a process is a `KvloomError`. Its `reason` (see protos/kvloom/v1/error_reason.proto) determines
the gRPC code, the HTTP status and the OpenAI `type` and `code`, so that every interface reports a fault in the same
way.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from kvloom import enums
from kvloom.limits_state import LimitsState, limits_state_from_proto, limits_state_to_proto
from kvloom.v1.error_reason_pb2 import Error, ErrorReason


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorKind:
    """How each interface reports one reason."""

    grpc_code: str
    """The name of a grpc.StatusCode."""
    http_status: int
    openai_type: str
    openai_code: str | None


_R = ErrorReason

CATALOGUE: Final[dict[int, ErrorKind]] = {
    _R.ERROR_REASON_INVALID_ARGUMENT: ErrorKind("INVALID_ARGUMENT", 400, "invalid_request_error", None),
    _R.ERROR_REASON_UNSUPPORTED_PARAMETER: ErrorKind(
        "INVALID_ARGUMENT", 400, "invalid_request_error", "unsupported_parameter"
    ),
    _R.ERROR_REASON_MODEL_NOT_FOUND: ErrorKind("NOT_FOUND", 404, "invalid_request_error", "model_not_found"),
    _R.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED: ErrorKind(
        "INVALID_ARGUMENT", 400, "invalid_request_error", "context_length_exceeded"
    ),
    _R.ERROR_REASON_REQUEST_TOO_LARGE: ErrorKind("INVALID_ARGUMENT", 413, "invalid_request_error", "request_too_large"),
    _R.ERROR_REASON_UNAUTHENTICATED: ErrorKind("UNAUTHENTICATED", 401, "authentication_error", "invalid_api_key"),
    _R.ERROR_REASON_PERMISSION_DENIED: ErrorKind("PERMISSION_DENIED", 403, "permission_error", "permission_denied"),
    _R.ERROR_REASON_NOT_FOUND: ErrorKind("NOT_FOUND", 404, "invalid_request_error", "not_found"),
    _R.ERROR_REASON_METHOD_NOT_ALLOWED: ErrorKind("UNIMPLEMENTED", 405, "invalid_request_error", "method_not_allowed"),
    _R.ERROR_REASON_UNSUPPORTED_MEDIA_TYPE: ErrorKind(
        "INVALID_ARGUMENT", 415, "invalid_request_error", "unsupported_media_type"
    ),
    _R.ERROR_REASON_DUPLICATE_REQUEST_ID: ErrorKind(
        "ALREADY_EXISTS", 409, "invalid_request_error", "duplicate_request_id"
    ),
    _R.ERROR_REASON_EVENTS_GONE: ErrorKind("OUT_OF_RANGE", 410, "invalid_request_error", "events_gone"),
    _R.ERROR_REASON_STREAM_TAKEN_OVER: ErrorKind("ABORTED", 409, "invalid_request_error", "stream_taken_over"),
    _R.ERROR_REASON_REQUEST_TIMEOUT: ErrorKind("DEADLINE_EXCEEDED", 408, "invalid_request_error", "request_timeout"),
    _R.ERROR_REASON_UNSUPPORTED_TRANSFER_CODING: ErrorKind(
        "UNIMPLEMENTED", 501, "invalid_request_error", "unsupported_transfer_coding"
    ),
    _R.ERROR_REASON_UNSUPPORTED_HTTP_VERSION: ErrorKind(
        "UNIMPLEMENTED", 505, "invalid_request_error", "unsupported_http_version"
    ),
    _R.ERROR_REASON_ADAPTER_NOT_FOUND: ErrorKind("NOT_FOUND", 404, "invalid_request_error", "model_not_found"),
    _R.ERROR_REASON_ALREADY_EXISTS: ErrorKind("ALREADY_EXISTS", 409, "invalid_request_error", "already_exists"),
    _R.ERROR_REASON_FAILED_PRECONDITION: ErrorKind(
        "FAILED_PRECONDITION", 409, "invalid_request_error", "failed_precondition"
    ),
    _R.ERROR_REASON_CONTENT_FILTERED: ErrorKind("FAILED_PRECONDITION", 400, "invalid_request_error", "content_filter"),
    _R.ERROR_REASON_RATE_LIMITED: ErrorKind("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_exceeded"),
    _R.ERROR_REASON_QUEUE_FULL: ErrorKind("RESOURCE_EXHAUSTED", 429, "overloaded_error", "queue_full"),
    _R.ERROR_REASON_NO_SHARD_READY: ErrorKind("UNAVAILABLE", 503, "overloaded_error", "no_shard_ready"),
    _R.ERROR_REASON_QUEUE_TIMEOUT: ErrorKind("DEADLINE_EXCEEDED", 408, "overloaded_error", "queue_timeout"),
    _R.ERROR_REASON_DEADLINE_EXCEEDED: ErrorKind("DEADLINE_EXCEEDED", 504, "api_error", "deadline_exceeded"),
    _R.ERROR_REASON_DEADLINE_IMPOSSIBLE: ErrorKind("DEADLINE_EXCEEDED", 504, "api_error", "deadline_impossible"),
    _R.ERROR_REASON_DRAINING: ErrorKind("UNAVAILABLE", 503, "overloaded_error", "draining"),
    _R.ERROR_REASON_OVERLOADED: ErrorKind("RESOURCE_EXHAUSTED", 503, "overloaded_error", "overloaded"),
    _R.ERROR_REASON_BUDGET_EXHAUSTED: ErrorKind("RESOURCE_EXHAUSTED", 429, "insufficient_quota", "insufficient_quota"),
    _R.ERROR_REASON_BUDGET_UNAVAILABLE: ErrorKind("UNAVAILABLE", 503, "api_error", "budget_unavailable"),
    _R.ERROR_REASON_BROWNOUT: ErrorKind("RESOURCE_EXHAUSTED", 429, "overloaded_error", "brownout"),
    _R.ERROR_REASON_SHARD_LOST: ErrorKind("UNAVAILABLE", 502, "api_error", "shard_lost"),
    _R.ERROR_REASON_ENGINE_FAILED: ErrorKind("INTERNAL", 500, "api_error", "engine_failed"),
    _R.ERROR_REASON_CLIENT_TOO_SLOW: ErrorKind("RESOURCE_EXHAUSTED", 429, "invalid_request_error", "client_too_slow"),
    _R.ERROR_REASON_CANCELLED: ErrorKind("CANCELLED", 499, "invalid_request_error", "cancelled"),
    _R.ERROR_REASON_ROUTER_LOST: ErrorKind("UNAVAILABLE", 503, "api_error", "router_unavailable"),
    _R.ERROR_REASON_SAFETY_UNAVAILABLE: ErrorKind("UNAVAILABLE", 503, "api_error", "safety_unavailable"),
    _R.ERROR_REASON_PROTOCOL_VIOLATION: ErrorKind(
        "INVALID_ARGUMENT", 400, "invalid_request_error", "protocol_violation"
    ),
    _R.ERROR_REASON_ANSWER_TOO_LARGE: ErrorKind("RESOURCE_EXHAUSTED", 400, "invalid_request_error", "answer_too_large"),
    _R.ERROR_REASON_NOT_IMPLEMENTED: ErrorKind("UNIMPLEMENTED", 501, "invalid_request_error", "not_implemented"),
    _R.ERROR_REASON_AUTH_UNAVAILABLE: ErrorKind("UNAVAILABLE", 503, "api_error", "auth_unavailable"),
    _R.ERROR_REASON_CONTROL_UNAVAILABLE: ErrorKind("UNAVAILABLE", 503, "api_error", "control_unavailable"),
    _R.ERROR_REASON_ORCHESTRATOR_UNAVAILABLE: ErrorKind("UNAVAILABLE", 503, "api_error", "orchestrator_unavailable"),
    _R.ERROR_REASON_CELL_UNAVAILABLE: ErrorKind("UNAVAILABLE", 503, "api_error", "cell_unavailable"),
    _R.ERROR_REASON_RESPONSE_UNAVAILABLE: ErrorKind("UNAVAILABLE", 503, "api_error", "response_unavailable"),
    _R.ERROR_REASON_REQUEST_QUARANTINED: ErrorKind("FAILED_PRECONDITION", 422, "api_error", "request_quarantined"),
    _R.ERROR_REASON_INTERNAL: ErrorKind("INTERNAL", 500, "api_error", "internal_error"),
}


class KvloomError(Exception):
    """A fault with a reason of the catalogue (a `kvloom.ErrorReason`). Printing it shows all of it.

    `message` is a sentence for the user. `field` names the request field at fault, as the caller knows it; "" if there
    is none. `retry_after_seconds` is the time after which a retry makes sense; 0: no advice. `limit` names the limit of
    the caller that refused the request (see `Error` in error_reason.proto); "": none did. `limits` is what is left of
    the caller's limits; None: it has none, or they are not known. `end` is the word for how a router ended the request,
    as in `Error`; "": no router did.
    """

    def __init__(
        self,
        reason: int,
        message: str,
        *,
        field: str = "",
        retry_after_seconds: float = 0.0,
        limit: str = "",
        limits: LimitsState | None = None,
        end: str = "",
    ) -> None:
        """`reason` may be a `kvloom.ErrorReason` or the number of one."""
        super().__init__(message)
        self.reason = enums.ErrorReason(reason)
        self.message = message
        self.field = field
        self.retry_after_seconds = retry_after_seconds
        self.limit = limit
        self.limits = limits
        self.end = end

    def __str__(self) -> str:
        facts = [self.reason_name]
        if self.field:
            facts.append(f"field {self.field}")
        if self.retry_after_seconds:
            facts.append(f"retry after {self.retry_after_seconds:.3g} s")
        return f"{self.message} ({', '.join(facts)})"

    def renamed(self, field: str, message: str) -> KvloomError:
        """The same error for callers who know the field by another name."""
        return KvloomError(
            self.reason,
            message,
            field=field,
            retry_after_seconds=self.retry_after_seconds,
            limit=self.limit,
            limits=self.limits,
            end=self.end,
        )

    def ended(self, end: str) -> KvloomError:
        """This error of a request that a router ended so; a copy if another request shares it and ended otherwise."""
        if not self.end:
            self.end = end
        if self.end == end:
            return self
        copy = self.renamed(self.field, self.message)
        copy.end = end
        return copy

    @property
    def kind(self) -> ErrorKind:
        """The gRPC code, HTTP status and OpenAI type of the reason."""
        return CATALOGUE.get(self.reason, CATALOGUE[_R.ERROR_REASON_INTERNAL])

    @property
    def reason_name(self) -> str:
        """The reason as ErrorInfo carries it, e.g. "QUEUE_FULL"."""
        return reason_name(self.reason)

    def to_proto(self) -> Error:
        return Error(
            reason=int(self.reason),  # pyrefly: ignore[bad-argument-type]  (the stubs take the enum's type)
            message=self.message,
            field=self.field,
            retry_after_seconds=self.retry_after_seconds,
            limit=self.limit,
            limits=None if self.limits is None else limits_state_to_proto(self.limits),
            end=self.end,
        )

    @classmethod
    def from_proto(cls, error: Error) -> KvloomError:
        return cls(
            error.reason,
            error.message,
            field=error.field,
            retry_after_seconds=error.retry_after_seconds,
            limit=error.limit,
            limits=limits_state_from_proto(error.limits) if error.HasField("limits") else None,
            end=error.end,
        )

    def to_openai(self) -> dict[str, dict[str, str | None]]:
        """The body of an OpenAI error response."""
        kind = self.kind
        return {
            "error": {
                "message": self.message,
                "type": kind.openai_type,
                "param": self.field or None,
                "code": kind.openai_code,
            }
        }


def reason_name(reason: int) -> str:
    return ErrorReason.Name(reason).removeprefix("ERROR_REASON_")


def invalid_argument(message: str, field: str = "") -> KvloomError:
    return KvloomError(_R.ERROR_REASON_INVALID_ARGUMENT, message, field=field)


def unsupported(message: str, field: str) -> KvloomError:
    return KvloomError(_R.ERROR_REASON_UNSUPPORTED_PARAMETER, message, field=field)


def context_length_exceeded(
    window: int, num_prompt_tokens: int, max_tokens: int | None, prompt_field: str, max_tokens_field: str
) -> KvloomError:
    """Prompt and answer do not fit the model's window. Clients match on the beginning of the message, which is
    OpenAI's, or on "prompt is too long". The field is the prompt's if it leaves no room for an answer."""
    is_prompt = num_prompt_tokens >= window
    detail = f"you requested {num_prompt_tokens + (max_tokens or 0)} tokens ({num_prompt_tokens} in the prompt"
    detail += f", {max_tokens} in the completion)" if max_tokens else ")"
    detail += ": the prompt is too long" if is_prompt else ""
    advice = "prompt" if is_prompt else f"prompt or {max_tokens_field}"
    return KvloomError(
        _R.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {window} tokens. However, {detail}. Please reduce the length of the "
        f"{advice}.",
        field=prompt_field if is_prompt else max_tokens_field,
    )


def request_timeout(message: str) -> KvloomError:
    """The client sent its request too slowly."""
    return KvloomError(_R.ERROR_REASON_REQUEST_TIMEOUT, message)


def protocol_violation(message: str) -> KvloomError:
    """A peer sent a frame that the protocol does not allow."""
    return KvloomError(_R.ERROR_REASON_PROTOCOL_VIOLATION, message)


def control_unavailable() -> KvloomError:
    return KvloomError(
        ErrorReason.ERROR_REASON_CONTROL_UNAVAILABLE,
        "The control service cannot be reached at the moment.",
        retry_after_seconds=1.0,
    )
