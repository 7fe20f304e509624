"""Errors as gRPC statuses."""

from __future__ import annotations

from typing import Any, cast

import grpc
from google.rpc import error_details_pb2, status_pb2

from kvloom.errors import KvloomError
from kvloom.limits_state import LimitsState, RateState
from kvloom.transport.grpc_errors import error_from_peer, to_grpc_status
from kvloom.v1.error_reason_pb2 import ErrorReason


def test_a_refusal_by_a_limit_has_retry_info_and_the_violated_quota() -> None:
    """Clients in any language read google.rpc's details; the SDK gets the error back as it was."""
    error = KvloomError(
        ErrorReason.ERROR_REASON_RATE_LIMITED,
        "The limit is reached.",
        retry_after_seconds=1.25,
        limit="tenant:acme/web requests_per_minute",
        limits=LimitsState(RateState(60, 0, 60.0)),
        end="rejected",
    )
    status = to_grpc_status(error)
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    [(key, value)] = status.trailing_metadata
    assert isinstance(value, bytes)
    details = status_pb2.Status.FromString(value).details
    quota, retry = error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
    assert any(detail.Unpack(quota) for detail in details)
    assert any(detail.Unpack(retry) for detail in details)
    assert quota.violations[0].subject == "tenant:acme/web"
    assert retry.retry_delay.ToMilliseconds() == 1250
    failure = grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), grpc.aio.Metadata((key, value)), status.details)
    found = error_from_peer(cast(Any, failure))
    assert found is not None
    assert (found.reason, found.limit, found.limits) == (error.reason, error.limit, error.limits)
    assert (found.retry_after_seconds, found.end) == (1.25, "rejected")
