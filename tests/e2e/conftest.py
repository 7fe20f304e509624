"""Fabrics that several end-to-end tests share; each is started once, by the command that users give."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright
from tokenizers import Tokenizer

from lab.free_ports import pick_free_ports
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.converted_model import find_builtin_encoder
from tests.e2e.fabric import START_TIMEOUT_SECONDS, RunningFabric, eventually

FOLDER = Path(__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SIM_STEP_SECONDS = 0.05
"""Long against the way of a cancellation through the processes, so that tests can count steps."""
GENERATOR = "smollm2-135m-instruct"
ENCODER = "all-MiniLM-L6-v2"
ROUTES = f"""
[[routes]]
name = "cheapest"
targets = ["tiny"]
fallback = ["{GENERATOR}"]
rules = [{{ features = ["tools"], targets = ["{GENERATOR}"] }}]
"""
MAX_CONNECTIONS = 300
STALL_SECONDS = 1.0
STRICT = f"""
[callers]
max_connections = {MAX_CONNECTIONS}

[edge]
header_timeout_seconds = 1.0
body_timeout_seconds = 2.0
max_body_bytes = 2097152

[router.health]
stall_seconds = {STALL_SECONDS}
"""


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and with them all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_SHARED: list[RunningFabric] = []


@contextlib.contextmanager
def shared(fabric: RunningFabric) -> Iterator[RunningFabric]:
    """Tests of a group share it: those that kill or restart its processes leave it whole."""
    _SHARED.append(fabric)
    yield fabric
    if fabric in _SHARED:
        _SHARED.remove(fabric)
        fabric.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """With pytest-xdist a group's tests follow one another: behind the last one its fabrics are stopped, so that their
    processes, of which there are dozens, don't compute beside all other tests."""
    yield
    if "PYTEST_XDIST_WORKER" in os.environ and _group(item) != _group(nextitem):
        while _SHARED:
            _SHARED.pop().stop()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a group waits for its fabric, whose engines compile their kernels where that was never done: on
    a slow CPU that other tests share this takes over two minutes."""
    for item in items:
        if item.path.parent == FOLDER and _group(item) is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(START_TIMEOUT_SECONDS + 60))


def _group(item: pytest.Item | None) -> str | None:
    marker = None if item is None else item.get_closest_marker("xdist_group")
    return None if marker is None else marker.args[0]


@pytest.fixture(autouse=True)
def shared_fabrics_are_left_whole() -> Iterator[None]:
    """A test that meets half a fabric would fail in place of the one that has left it so."""
    yield
    for fabric in _SHARED:
        eventually("all processes are ready", fabric.is_whole)


@pytest.fixture(scope="session")
def sim_fabric(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    """One edge, one router and two shards, for the group `sim`."""
    folder = tmp_path_factory.mktemp("sim")
    (folder / "kvloom.toml").write_text('[router.decision_log]\npath = "decisions.jsonl"\n')
    step_ms = str(1000 * SIM_STEP_SECONDS)
    sim = ("--engine", "sim", "--sim-step-ms", step_ms, "--shards", "2")
    with shared(RunningFabric.start(folder / "data", *sim, "--config", str(folder / "kvloom.toml"))) as fabric:
        yield fabric


@pytest.fixture(scope="session")
def torch_fabric(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    """The real models, for the group `torch`: two shards that generate, and one of the built-in encoder if that is
    installed."""
    options = ("--shards", "2")
    with contextlib.suppress(EngineError):
        find_builtin_encoder()
        options = ("--model", GENERATOR, "--model", ENCODER, "--shards", f"{GENERATOR}=2,{ENCODER}=1")
    with shared(RunningFabric.start(tmp_path_factory.mktemp("torch"), *options)) as fabric:
        yield fabric


@pytest.fixture(scope="session")
def control_fabric(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    """With tenants, and two edges, routers and shards, for the group `control`. Tests use organisations of their
    own, and leave the price of what is served at 0."""
    folder = tmp_path_factory.mktemp("control")
    (folder / "kvloom.toml").write_text("[control]\nenabled = true\nwitness = true\n")
    sim = ("--engine", "sim", "--sim-step-ms", "10", "--edges", "2", "--routers", "2")
    with shared(RunningFabric.start(folder / "data", *sim, "--config", str(folder / "kvloom.toml"))) as fabric:
        yield fabric


@pytest.fixture(scope="session")
def colocated_fabric(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    """With tenants, and with the routers inside the two edges, for the group `colocated`."""
    folder = tmp_path_factory.mktemp("colocated")
    (folder / "kvloom.toml").touch()
    options = ("--engine", "sim", "--control", "--colocate", "--edges", "2", "--config", str(folder / "kvloom.toml"))
    with shared(RunningFabric.start(folder / "data", *options)) as fabric:
        yield fabric


@pytest.fixture(scope="session")
def tiny_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with another tokenizer, template and window than the built-in one, for the sim engine."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.add_tokens(["quick brown fox"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 512}')
    return folder


@pytest.fixture(scope="session")
def models_fabric(model_dir: Path, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    """Some models, of which the first has two shards and the last is slow, and a route, for the group `models`."""
    folder = tmp_path_factory.mktemp("models")
    adapters = folder / "adapters"
    (adapters / "poetry").mkdir(parents=True)
    config = folder / "kvloom.toml"
    config.write_text(
        f'[edge]\nallow_adapter_changes = true\nadapters_dir = "{adapters}"\n{ROUTES}'
        f'[[models]]\nname = "{GENERATOR}"\nshard = {{ num_shards = 2 }}\n'
        f'[[models]]\nname = "tiny"\npath = "{tiny_dir}"\nshard = {{ num_shards = 1 }}\n'
        f'[[models]]\nname = "chat"\npath = "{model_dir}"\nshard = {{ num_shards = 1 }}\n'
        f'[[models]]\nname = "narrow"\npath = "{model_dir}"\n'
        "shard = { num_shards = 1, max_batch = 4, sim = { step_ms = 20.0 } }\n"
    )
    options = ("--engine", "sim", "--sim-step-ms", "2", "--config", str(config))
    with shared(RunningFabric.start(folder / "data", *options)) as fabric:
        yield fabric


@pytest.fixture(scope="session")
def strict_fabric(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    """With short limits to clients and to shards that are silent, and fixed ports for metrics, for the group
    `strict`."""
    folder = tmp_path_factory.mktemp("strict")
    (folder / "kvloom.toml").write_text(STRICT)
    sim = ("--engine", "sim", "--sim-step-ms", "10", "--shards", "3")
    ports = ("--metrics-port", str(first_free_port_of(6)))
    with shared(RunningFabric.start(folder / "data", *sim, *ports, "--config", str(folder / "kvloom.toml"))) as fabric:
        yield fabric


def first_free_port_of(num_ports: int) -> int:
    """Of as many ports in a row that are free."""
    for _ in range(100):
        (first,) = pick_free_ports(1)
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as stack:
            for port in range(first, first + num_ports):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError("no ports in a row are free")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """For tests of the session's event loop."""
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is not installed")
        pytest.skip("chromium is not installed")
    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"]
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        await started.close()
