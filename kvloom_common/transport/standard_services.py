"""The services that every gRPC server of the fabric has beside its own: health checks and reflection."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvloom_common.process.service import HealthServicer
from kvloom_common.transport.checked_server import CheckedServer

HEALTH_NAME = "grpc.health.v1.Health"


def add_health_and_reflection(
    server: grpc.aio.Server, service_names: Sequence[str], *, with_reflection: bool
) -> HealthServicer:
    """Serve grpc.health.v1 and, if wanted, reflection. The status is NOT_SERVING until `set_serving` changes it."""
    checked = CheckedServer(server)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, checked)  # pyrefly: ignore[bad-argument-type]
    if with_reflection:
        described = reflection.aio.ReflectionServicer([*service_names, HEALTH_NAME, reflection.SERVICE_NAME])
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(described, checked)
    return health
