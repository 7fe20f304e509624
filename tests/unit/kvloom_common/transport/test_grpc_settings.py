"""gRPC reads its settings once, when it is imported: every service must set them before that."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["edge_http", "router", "shard_server", "safety_svc"])
def test_a_service_sets_grpc_up_before_it_is_imported(package: str):
    """If they were set later, they would change nothing, and only the CPU load would show it."""
    program = f"import sys, {package}.server; names = list(sys.modules); print('grpc' in names and names.index('grpc'))"
    program += "; print(names.index('kvloom_common.transport.grpc_settings'))"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    grpc_at, settings_at = done.stdout.split()
    assert grpc_at == "False" or int(settings_at) < int(grpc_at)
