"""The error catalogue maps every reason to every interface, and errors survive the conversion to a gRPC status."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import status_pb2

from kvloom.errors import CATALOGUE, KvloomError, invalid_argument, unsupported
from kvloom.transport import grpc_errors
from kvloom.v1.error_reason_pb2 import ErrorReason

REASONS = [value for value in ErrorReason.values() if value != ErrorReason.ERROR_REASON_UNSPECIFIED]


@pytest.mark.parametrize("reason", REASONS, ids=ErrorReason.Name)
def test_every_reason_has_a_kind(reason: int) -> None:
    """A reason without an entry would reach clients as a 500."""
    kind = CATALOGUE[reason]
    assert grpc.StatusCode[kind.grpc_code] is not grpc.StatusCode.OK
    assert 400 <= kind.http_status < 600


def test_an_unknown_reason_is_an_internal_error() -> None:
    """A newer peer may send a reason that this process does not know."""
    assert KvloomError(9999, "?").kind.http_status == 500


@pytest.mark.parametrize("reason", REASONS, ids=ErrorReason.Name)
def test_an_error_survives_the_gRPC_status(reason: ErrorReason.ValueType) -> None:
    """SDK users must see the same reason, message and field that the service raised."""
    error = KvloomError(reason, "what is wrong", field="stop[3]", retry_after_seconds=1.5)
    status = grpc_errors.to_grpc_status(error)
    trailers = grpc.aio.Metadata.from_tuple(tuple(status.trailing_metadata))
    rpc_error = grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailers, status.details)
    back = grpc_errors.from_rpc_error(rpc_error)
    assert (back.reason, back.message, back.field) == (error.reason, error.message, error.field)
    assert back.retry_after_seconds == 1.5


def test_the_status_follows_AIP_193() -> None:
    """Clients in other languages read google.rpc.Status with ErrorInfo and RetryInfo."""
    error = KvloomError(ErrorReason.ERROR_REASON_QUEUE_FULL, "full", retry_after_seconds=2.0)
    status = grpc_errors.to_grpc_status(error)
    details = status_pb2.Status.FromString(dict(status.trailing_metadata)["grpc-status-details-bin"])
    assert [any_.type_url.rpartition("/")[2] for any_ in details.details] == [
        "google.rpc.ErrorInfo",
        "google.rpc.RetryInfo",
    ]


def test_an_error_survives_a_frame() -> None:
    """Errors inside StepFrames carry all that the HTTP edge needs."""
    error = invalid_argument("bad", field="temperature")
    back = KvloomError.from_proto(error.to_proto())
    assert back.to_openai() == error.to_openai()


def test_the_openai_body_names_the_field() -> None:
    """`param` is what client code switches on."""
    assert unsupported("tools are not supported.", "tools").to_openai() == {
        "error": {
            "message": "tools are not supported.",
            "type": "invalid_request_error",
            "param": "tools",
            "code": "unsupported_parameter",
        }
    }
