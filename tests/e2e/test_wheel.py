"""What `pip install` brings to another machine is whole: an SDK with few dependencies, and a fabric that runs from its
wheel with no repository beside it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.e2e.fabric import REPOSITORY, RunningFabric, kvloom_environment, run_kvloom

BUILD = "import sys; from hatchling import build; build.build_wheel(sys.argv[1])"
ASK = """
import asyncio, sys
import kvloom

async def main():
    async with kvloom.Client(sys.argv[1]) as client:
        async for delta in client.generate(model=sys.argv[2], token_ids=[1, 2, 3], max_tokens=4):
            tokens.extend(delta.token_ids)

tokens = []
asyncio.run(main())
print(kvloom.__version__, len(tokens))
"""
NAMES = "import kvloom; print(*dir(kvloom))"


def requirements(folder: Path, *extras: str) -> list[str]:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    optional = project.get("optional-dependencies", {})
    return project["dependencies"] + [line for extra in extras for line in optional[extra]]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The SDK's and the fabric's, built from what git knows: a clean checkout has no gRPC stubs."""
    folder = tmp_path_factory.mktemp("wheels")
    source = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=30.0, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file() and not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, source / name)
    for project in (source, source / "fabric"):
        done = subprocess.run(
            [sys.executable, "-c", BUILD, str(folder)],
            cwd=project, capture_output=True, text=True, timeout=120.0, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    (sdk,) = folder.glob("kvloom-*.whl")
    (fabric,) = folder.glob("kvloom_fabric-*.whl")
    return sdk, fabric


def with_dependencies(wanted: list[str]) -> Iterator[importlib.metadata.Distribution]:
    """These distributions and all that they need, as they are installed here."""
    seen: set[tuple[str, str]] = set()
    queue = [(Requirement(text), "") for text in wanted]
    while queue:
        requirement, _ = queue.pop()
        if requirement.name in ("kvloom", "kvloom-fabric"):
            continue
        for extra in requirement.extras | {""}:
            if (requirement.name, extra) in seen:
                continue
            seen.add((requirement.name, extra))
            distribution = importlib.metadata.distribution(requirement.name)
            if not extra or not any(name == requirement.name for name, _ in seen - {(requirement.name, extra)}):
                yield distribution
            for text in distribution.requires or []:
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    queue.append((needed, extra))


def make_virtualenv(home: Path, wheels: list[Path], wanted: list[str]) -> Path:
    """A virtualenv with these wheels, installed by pip, and the dependencies that they declare, linked from the one
    that runs the tests (nothing is fetched). Returns its Python."""
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    for distribution in with_dependencies(wanted):
        for file in distribution.files or []:
            if ".." in file.parts or "__pycache__" in file.parts:
                continue
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(file))).resolve())
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    subprocess.run(
        [*pip, "install", "--quiet", "--no-index", "--no-deps", *map(str, wheels)],
        timeout=120.0, check=True, env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    return python


@pytest.fixture(scope="module")
def sdk_python(wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_virtualenv(tmp_path_factory.mktemp("sdk") / "venv", [wheels[0]], requirements(REPOSITORY))


@pytest.fixture(scope="module")
def fabric_python(wheels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the embedded engine (torch)."""
    wanted = requirements(REPOSITORY) + requirements(REPOSITORY / "fabric")
    return make_virtualenv(tmp_path_factory.mktemp("fabric") / "venv", list(wheels), wanted)


def path_of(python: Path) -> str:
    return f"{python.parent}:{os.environ.get('PATH', '')}"


def fetched(request: urllib.request.Request | str) -> str:
    with urllib.request.urlopen(request, timeout=20.0) as answer:
        return answer.read().decode()


def test_each_wheel_has_one_name_and_nothing_that_belongs_to_the_repository(wheels: tuple[Path, Path]) -> None:
    """A module called `tools` in site-packages would hide a user's own; benches and tests are no part of a product."""
    for wheel, package in zip(wheels, ("kvloom", "kvloom_fabric"), strict=True):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {package}
        assert not [name for name in names if "/bench/" in name or "tests/" in name]
    with zipfile.ZipFile(wheels[0]) as archive:
        names = archive.namelist()
    assert "kvloom/py.typed" in names  # the SDK's types count for everyone who installs it
    assert "kvloom/v1/router_service_pb2_grpc.py" in names
    assert "kvloom/v1/router_service_pb2.pyi" in names


def test_the_sdk_alone_shows_its_public_names(sdk_python: Path) -> None:
    """`dir(kvloom)` is where a user looks first, and the version is where he looks when something is wrong."""
    done = subprocess.run([sdk_python, "-P", "-c", NAMES], capture_output=True, text=True, timeout=60.0, check=True)
    assert {"ChatMessage", "Client", "Delta", "KvloomError", "__version__"} <= set(done.stdout.split())


def test_a_fabric_runs_from_the_wheel(fabric_python: Path, sdk_python: Path, model_dir: Path, tmp_path: Path) -> None:
    """Edge, router, shard and safety service find all they need (also what is no Python: page, built-in policy), and
    not a user's own modules of the same names. The SDK from the other wheel gets an answer."""
    for name in ("tools", "router"):
        (tmp_path / "own" / name).mkdir(parents=True)
        (tmp_path / "own" / name / "__init__.py").write_text("raise RuntimeError('a user\\'s own module')\n")
    settings = {"PATH": path_of(fabric_python), "PYTHONPATH": str(tmp_path / "own")}
    fabric = RunningFabric.start(
        tmp_path / "data", "--engine", "sim", "--sim-step-ms", "1", "--model", str(model_dir), **settings
    )
    try:
        assert "<title>" in fetched(f"{fabric.http_url}/")
        model = json.loads(fetched(f"{fabric.http_url}/v1/models"))["data"][0]["id"]
        question = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
        headers = {"content-type": "application/json"}
        url = f"{fabric.http_url}/v1/chat/completions"
        answer = json.loads(fetched(urllib.request.Request(url, json.dumps(question).encode(), headers)))
        assert answer["usage"]["completion_tokens"] == 4
        asked = subprocess.run(
            [sdk_python, "-P", "-c", ASK, fabric.router_address, model],
            capture_output=True, text=True, timeout=60.0, check=False,
        )  # fmt: skip
        assert asked.returncode == 0, asked.stderr
        version = importlib.metadata.version("kvloom")
        assert asked.stdout.split() == [version, "4"]
    finally:
        fabric.stop()


def test_what_belongs_to_the_repository_or_an_extra_is_named(
    fabric_python: Path, model_dir: Path, tmp_path: Path
) -> None:
    """A user of the wheel who asks for a bench, or for the engine that he has not installed, is told where it is, and
    shown no stack trace."""
    env = kvloom_environment(tmp_path / "data", PATH=path_of(fabric_python))
    done = run_kvloom("up", "--detach", "--model", str(model_dir), env=env)
    assert done.returncode == 1
    assert 'the torch engine: torch is not installed; it comes with pip install "kvloom-fabric[torch]"' in done.stderr
    bench = run_kvloom("bench", "index", env=env)
    assert bench.returncode == 1
    assert "benches are part of kvloom's repository" in bench.stderr
    assert "Traceback" not in done.stderr + bench.stderr
