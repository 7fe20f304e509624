"""Converts errors of the catalogue to gRPC statuses (AIP-193: google.rpc.Status with ErrorInfo, RetryInfo and
QuotaFailure), and back."""

from __future__ import annotations

from typing import Any, Final, NoReturn, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvloom.errors import KvloomError
from kvloom.limits_state import limits_state_from_proto, limits_state_to_proto
from kvloom.v1.error_reason_pb2 import ErrorReason, LimitsState

DOMAIN: Final = "kvloom"


def to_grpc_status(error: KvloomError) -> grpc.Status:
    """The status for `context.abort_with_status`."""
    info = error_details_pb2.ErrorInfo(reason=error.reason_name, domain=DOMAIN)
    if error.field:
        info.metadata["field"] = error.field
    if error.limit:
        info.metadata["limit"] = error.limit
    if error.end:
        info.metadata["end"] = error.end
    details = [_pack(info)]
    if error.retry_after_seconds > 0:
        delay = duration_pb2.Duration()
        delay.FromMicroseconds(round(error.retry_after_seconds * 1e6))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    if error.limit:
        violation = error_details_pb2.QuotaFailure.Violation(
            subject=error.limit.partition(" ")[0], description=error.message
        )
        details.append(_pack(error_details_pb2.QuotaFailure(violations=[violation])))
    if error.limits is not None:
        details.append(_pack(limits_state_to_proto(error.limits)))
    code: int = grpc.StatusCode[error.kind.grpc_code].value[0]
    return rpc_status.to_status(status_pb2.Status(code=code, message=error.message, details=details))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: KvloomError) -> NoReturn:
    """End an RPC with the error's status and its details. Raises, as gRPC's own abort does."""
    # The published type stubs of grpc.aio do not know this method.
    await cast(Any, context).abort_with_status(to_grpc_status(error))
    raise AssertionError("abort_with_status raises")


def from_rpc_error(error: grpc.aio.AioRpcError) -> KvloomError:
    """The KvloomError of a failed RPC: the peer's own error if the status carries one, otherwise ROUTER_LOST or
    INTERNAL."""
    peer_error = error_from_peer(error)
    if peer_error is not None:
        return peer_error
    code = error.code()
    unavailable = code is grpc.StatusCode.UNAVAILABLE
    reason = ErrorReason.ERROR_REASON_ROUTER_LOST if unavailable else ErrorReason.ERROR_REASON_INTERNAL
    return KvloomError(reason, f"{code.name}: {error.details()}")


def error_from_peer(error: grpc.aio.AioRpcError) -> KvloomError | None:
    """The catalogue's error that the peer sent; None when gRPC itself made the status, e.g. for a lost connection."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            status = status_pb2.Status.FromString(value)
            info, retry, limits = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), LimitsState()
            has_limits = False
            for detail in status.details:
                has_limits = detail.Unpack(limits) or has_limits
                _ = detail.Unpack(info) or detail.Unpack(retry)
            if info.domain == DOMAIN and (name := f"ERROR_REASON_{info.reason}") in ErrorReason.keys():  # noqa: SIM118  (the enum wrapper is no container)
                return KvloomError(
                    ErrorReason.Value(name),
                    status.message,
                    field=info.metadata.get("field", ""),
                    retry_after_seconds=retry.retry_delay.ToMicroseconds() / 1e6,
                    limit=info.metadata.get("limit", ""),
                    limits=limits_state_from_proto(limits) if has_limits else None,
                    end=info.metadata.get("end", ""),
                )
    return None


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
