"""Docker's HEALTHCHECK: exits with 0 if the shard at HOST:PORT serves. Runs with the image's gRPC."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE = "kvloom.v1.ShardService"
TIMEOUT_SECONDS = 3.0


def is_serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


if __name__ == "__main__":
    sys.exit(0 if is_serving(sys.argv[1]) else 1)
