"""Docker's HEALTHCHECK: exits with 0 if the shard at HOST:PORT serves. Runs with the image's gRPC. With CONFIG,
it proves to the shard that it belongs to the fabric."""

import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE = "kvloom.v1.ShardService"
TIMEOUT_SECONDS = 3.0


def open_channel(address: str, config_path: str) -> grpc.Channel:
    if config_path:
        from kvloom_common.config import load_config
        from kvloom_common.trust.fabric_trust import NO_SECRET, load_trust

        trust = load_trust(load_config(Path(config_path)), ("tools",), "healthcheck")
        if trust is not NO_SECRET:
            return grpc.secure_channel(address, trust.channel_credentials(), [trust.demanded_of("shard")])
    return grpc.insecure_channel(address)


def is_serving(address: str, config_path: str = "") -> bool:
    with open_channel(address, config_path) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=TIMEOUT_SECONDS)
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


if __name__ == "__main__":
    sys.exit(0 if is_serving(*sys.argv[1:3]) else 1)
