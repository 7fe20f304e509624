"""The parts of the TensorRT-LLM image that can be tested without NVIDIA's image: stubs, configuration, health check."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from concurrent import futures
from pathlib import Path
from types import ModuleType

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvloom_common.config import load_config
from tests.conftest import REPOSITORY

DEPLOY = REPOSITORY / "deploy" / "tensorrt_llm"
PROTOBUFS = ("4.21.12", "4.25.8", "5.29.5")
ROUND_TRIP = """
import google.protobuf
from kvloom.v1 import router_service_pb2, safety_service_pb2, shard_service_pb2
frame = shard_service_pb2.ShardSubmit(request_id="a", prompt_token_ids=[1, 2])
assert shard_service_pb2.ShardSubmit.FromString(frame.SerializeToString()) == frame
print(google.protobuf.__version__)
"""


def generator_version() -> str:
    found = re.search(r"grpcio-tools==(\S+)", (DEPLOY / "Dockerfile").read_text())
    assert found is not None
    return found.group(1)


def run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | env,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not os.environ.get("KVLOOM_TEST_OLD_GRPC"), reason="installs old gRPC: KVLOOM_TEST_OLD_GRPC=1")
@pytest.mark.timeout(600)
def test_stubs_of_the_old_generator_load_with_old_protobufs(tmp_path: Path):
    """TensorRT-LLM's image has an old protobuf, which refuses newer generators' stubs."""
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(python, "-m", "pip", "install", "-q", f"grpcio-tools=={generator_version()}", "setuptools<81")
    protos = sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / "protos").rglob("*.proto"))
    run(python, "-m", "grpc_tools.protoc", "-Iprotos", f"--python_out={tmp_path}", *protos)
    for version in PROTOBUFS:
        target = tmp_path / version
        run(python, "-m", "pip", "install", "-q", "--no-deps", "--target", target, f"protobuf=={version}")
        out = run(python, "-P", "-W", "error", "-c", ROUND_TRIP, PYTHONPATH=f"{target}:{tmp_path}")
        assert out.strip() == version


def test_the_generator_and_its_companions_are_of_one_version():
    """Stubs of a newer generator do not load with an older runtime."""
    companions = re.findall(r"^grpcio-\S+==(\S+)$", (DEPLOY / "requirements.txt").read_text(), re.MULTILINE)
    assert len(companions) == 3
    assert set(companions) == {generator_version()}


def test_the_protos_are_of_a_syntax_that_old_generators_know():
    """Protobuf editions need protoc 27 or newer."""
    for path in (REPOSITORY / "protos").rglob("*.proto"):
        assert 'syntax = "proto3";' in path.read_text()


def test_the_configuration_loads():
    """Operators use it as their starting point."""
    config = load_config(DEPLOY / "kvloom.toml")
    assert config.shard.engine == "tensorrt_llm"


def test_the_image_runs_unprivileged_and_copies_only_existing_files():
    """A mistake would show only after minutes of building, and root in a container is root for the GPU's driver."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    user = lines.index("USER kvloom")
    command = next(index for index, line in enumerate(lines) if line.startswith("CMD ["))
    assert user < command
    for line in lines:
        words = line.split()
        if words and words[0] == "COPY" and not words[1].startswith("--from"):
            assert all((REPOSITORY / source).exists() for source in words[1:-1]), line


def test_the_image_keeps_nvidias_entry_point():
    """It sets up CUDA's forward compatibility: without it the container fails on older drivers."""
    assert "ENTRYPOINT" not in (DEPLOY / "Dockerfile").read_text()
    page = (REPOSITORY / "docs" / "how-to" / "tensorrt-llm.md").read_text()
    assert "--entrypoint" not in page, "the doctor must run behind it, too"


GRPC_LISTS = {
    "older than the stubs' generator": ("grpcio==1.62.1\nprotobuf==4.24.4\nclick==8.1.7", "1.62.1"),
    "newer": (
        "grpcio==1.71.2\nprotobuf==5.29.5\ngoogleapis-common-protos==1.70.0\ntorch==2.9.0a0+145a3a7bda.nv25.10",
        "1.62.3",
    ),
    "none": ("numpy==1.26.4\n-e /opt/pytorch\nfoo @ file:///x", "1.62.3"),
}
"""What `pip freeze` may print in images of NVIDIA, and the version of gRPC's companions that fits."""


@pytest.mark.parametrize("name", GRPC_LISTS)
def test_the_requirements_fit_an_images_packages(name: str, tmp_path: Path):
    """grpcio-status 1.62.3 beside grpcio 1.62.1 cannot be installed: the build would end there."""
    packages, companion = GRPC_LISTS[name]
    (tmp_path / "packages.txt").write_text(packages)
    script, requirements = DEPLOY / "fit_packages.py", DEPLOY / "requirements.txt"
    lines = run(sys.executable, script, requirements, "--packages", tmp_path / "packages.txt").splitlines()
    assert f"grpcio-status=={companion}" in lines
    assert f"grpcio-health-checking=={companion}" in lines
    grpc_lines = [line for line in lines if line.startswith("grpcio=")]
    assert grpc_lines == [line for line in packages.splitlines() if line.startswith("grpcio=")]
    assert len(lines) == len([line for line in requirements.read_text().splitlines() if line and line[0] != "#"])


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ("protobuf==3.20.3", "protobuf 3.20.3 is installed, and kvloom needs protobuf>=4.21.6"),
        ("grpcio==1.51.0", "grpcio 1.51.0 is installed"),
        ("click==7.1", "click 7.1 is installed"),
    ],
)
def test_packages_that_contradict_ours_are_named(packages: str, message: str, tmp_path: Path):
    """pip's own message lists every package that it has looked at."""
    (tmp_path / "packages.txt").write_text(packages)
    command = [sys.executable, DEPLOY / "fit_packages.py", DEPLOY / "requirements.txt"]
    done = subprocess.run(
        [*command, "--packages", tmp_path / "packages.txt"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert message in done.stderr


def load_healthcheck() -> ModuleType:
    spec = importlib.util.spec_from_file_location("healthcheck", DEPLOY / "healthcheck.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_health_check_follows_the_shards_status():
    """A drained, dead or starting shard is unhealthy."""
    check = load_healthcheck()
    servicer = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert not check.is_serving(address)
        servicer.set(check.SERVICE, health_pb2.HealthCheckResponse.SERVING)
        assert check.is_serving(address)
        servicer.set(check.SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        assert not check.is_serving(address)
    finally:
        server.stop(None).wait(5)
    assert not check.is_serving(address)
