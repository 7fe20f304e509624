"""What `pip install` brings to another machine is whole: a fabric runs from the wheel, with no repository beside it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

from tests.e2e.fabric import REPOSITORY, RunningFabric, kvloom_environment, run_kvloom

PACKAGES = ("edge_http", "kvloom", "router", "safety_svc", "shard_server", "tools")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy (building leaves things behind) and unpacked as pip would."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(REPOSITORY / file, source)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    (wheel,) = folder.glob("kvloom-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def fetched(request: urllib.request.Request | str) -> str:
    with urllib.request.urlopen(request, timeout=20.0) as answer:
        return answer.read().decode()


def test_a_fabric_runs_from_the_wheel(installed: Path, model_dir: Path, tmp_path: Path) -> None:
    """Edge, router, shard and safety service find all they need: also what is no Python (page, built-in policy)."""
    assert (installed / "kvloom" / "py.typed").exists()  # the SDK's types count for whoever installs it
    settings = {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    where = "import edge_http.endpoints.page as page; print(page.__file__)"
    env = kvloom_environment(tmp_path / "data", **settings)
    imported = subprocess.run(
        [sys.executable, "-c", where], env=env, capture_output=True, text=True, timeout=30.0, check=True
    )
    assert Path(imported.stdout.strip()).is_relative_to(installed)

    fabric = RunningFabric.start(tmp_path / "data", "--engine", "sim", "--sim-step-ms", "1", **settings)
    try:
        assert "<title>" in fetched(f"{fabric.http_url}/")
        question = {
            "model": "smollm2-135m-instruct",
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "Hello"}],
        }
        headers = {"content-type": "application/json"}
        url = f"{fabric.http_url}/v1/chat/completions"
        answer = json.loads(fetched(urllib.request.Request(url, json.dumps(question).encode(), headers)))
        assert answer["usage"]["completion_tokens"] == 4
    finally:
        fabric.stop()


def test_a_shard_without_its_engine_says_what_to_install(installed: Path, model_dir: Path, tmp_path: Path) -> None:
    """The services can be installed without the embedded engine: whoever then starts it is told, not shown a trace."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    env = kvloom_environment(tmp_path / "data", PYTHONPATH=f"{tmp_path}:{installed}", PYTHONSAFEPATH="1")
    done = run_kvloom("up", "--detach", "--model", str(model_dir), env=env)
    assert done.returncode == 1
    assert 'the torch engine: torch is not installed; it comes with pip install "kvloom[torch]"' in done.stderr
    assert "Traceback" not in done.stderr
