"""The protocol's enums as Python's, for the users of the SDK. Their values are the numbers in protos/kvloom/v1."""

from __future__ import annotations

import enum


class ErrorReason(enum.IntEnum):
    """Why a request was refused or failed. protos/kvloom/v1/error_reason.proto explains each."""

    UNSPECIFIED = 0
    INVALID_ARGUMENT = 1
    UNSUPPORTED_PARAMETER = 2
    MODEL_NOT_FOUND = 3
    CONTEXT_LENGTH_EXCEEDED = 4
    REQUEST_TOO_LARGE = 5
    UNAUTHENTICATED = 6
    PERMISSION_DENIED = 7
    NOT_FOUND = 8
    METHOD_NOT_ALLOWED = 9
    UNSUPPORTED_MEDIA_TYPE = 10
    DUPLICATE_REQUEST_ID = 11
    EVENTS_GONE = 12
    STREAM_TAKEN_OVER = 13
    REQUEST_TIMEOUT = 14
    UNSUPPORTED_TRANSFER_CODING = 15
    UNSUPPORTED_HTTP_VERSION = 16
    ADAPTER_NOT_FOUND = 17
    ALREADY_EXISTS = 18
    FAILED_PRECONDITION = 19
    CONTENT_FILTERED = 20
    RATE_LIMITED = 30
    QUEUE_FULL = 31
    NO_SHARD_READY = 32
    QUEUE_TIMEOUT = 33
    DEADLINE_EXCEEDED = 34
    DRAINING = 35
    OVERLOADED = 36
    BUDGET_EXHAUSTED = 37
    BUDGET_UNAVAILABLE = 38
    BROWNOUT = 39
    SHARD_LOST = 40
    ENGINE_FAILED = 41
    CLIENT_TOO_SLOW = 42
    CANCELLED = 43
    ROUTER_LOST = 44
    SAFETY_UNAVAILABLE = 45
    PROTOCOL_VIOLATION = 46
    ANSWER_TOO_LARGE = 47
    NOT_IMPLEMENTED = 48
    AUTH_UNAVAILABLE = 49
    INTERNAL = 50
    CONTROL_UNAVAILABLE = 51
    DEADLINE_IMPOSSIBLE = 52
    RESPONSE_UNAVAILABLE = 53
    REQUEST_QUARANTINED = 54
    ORCHESTRATOR_UNAVAILABLE = 55
    CELL_UNAVAILABLE = 56

    @classmethod
    def _missing_(cls, value: object) -> ErrorReason | None:
        """A newer peer may send a reason that this process does not know."""
        return cls.INTERNAL if isinstance(value, int) else None


class FinishReason(enum.IntEnum):
    """Why a choice of an answer ended."""

    UNSPECIFIED = 0
    STOP = 1
    """The model ended its answer, or a stop string or stop token did."""
    LENGTH = 2
    """max_tokens or the model's context window was reached."""
    CONTENT_FILTER = 3
    """The safety policy halted the answer."""
    CANCELLED = 4
    """The request was cancelled."""
    ERROR = 5
    """The choice failed. Reading the answer raises the KvloomError."""
    TOOL_CALLS = 6
    """The model called tools, and waits for their results."""

    @classmethod
    def _missing_(cls, value: object) -> FinishReason | None:
        """A newer peer may send a reason that this process does not know."""
        return cls.UNSPECIFIED if isinstance(value, int) else None


class Tier(enum.StrEnum):
    """The priority of a request compared with others."""

    INTERACTIVE = "interactive"
    BATCH = "batch"
    """The request can wait, and is rejected before others under overload."""


class CancelOutcome(enum.StrEnum):
    """The outcome of `Client.cancel`. Only CANCELLED is true."""

    CANCELLED = "cancelled"
    """The request was running or waiting, and has been cancelled."""
    ALREADY_ENDED = "already_ended"
    """The request had ended before."""
    NOT_FOUND = "not_found"
    """No router knows such a request of this caller. It may have ended long ago."""

    def __bool__(self) -> bool:
        return self is CancelOutcome.CANCELLED
