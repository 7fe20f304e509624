"""Fixtures that more than one kind of test needs."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest
import structlog

if TYPE_CHECKING:
    from shard_server.engines.torch_engine.model_runner import ModelRunner
    from tests.fakes.plugin_site import PluginSite
    from tests.loaded_models import LoadedModels

REPOSITORY = Path(__file__).resolve().parent.parent

pytest_plugins = ["tests.fabric_starts", "tests.run_order"]

NEEDS_TORCH = (
    "unit/shard_server/torch_engine/*",
    "unit/shard_server/test_queue_order.py",
    "unit/tools/bench/test_engine*",
    "lab/bench/test_engine_vs.py",
    "unit/tools/test_cli.py",
    "property/test_call_guides.py",
    "property/test_torch_*",
)
"""Quick tests that are left out where the embedded engine is not installed, and by `make unit`, since torch takes each
process seconds to import."""
if "TEST_WITHOUT_TORCH" in os.environ:
    sys.modules["torch"] = None  # type: ignore[assignment]  (what asks for it gets an ImportError, and its test skips)
HAS_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore_glob = [] if HAS_TORCH else list(NEEDS_TORCH)

GC_THRESHOLD = 10_000
"""With Python's own 700 the simulation spends a fifth of its time on looking for garbage, of which there is little."""

LAST_FILE = pytest.StashKey[Path]()
"""The file of the test that ran last."""

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported. Threads of several test processes wait for one another by spinning, on cores that the
    # others need. Engines set their own number all the same.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# With the values of all variables, which is structlog's own way of showing one, a stack trace takes a second.
structlog.configure(
    [
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

# A busy machine is no reason to fail; pytest-timeout finds what hangs. The examples are the same in every run, so that
# a change that breaks nothing passes: `--hypothesis-profile=random` and `make fuzz` look for others. Tests say how many
# they need of hypothesis' own 100 (tests/examples.py): `make test` tries a part, `make test-long` ten times as many.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("long", deadline=None, derandomize=True, max_examples=400)
hypothesis.settings.register_profile("random", deadline=None)
hypothesis.settings.load_profile("fixed")


def pytest_report_header() -> list[str]:
    return [f"left out, because they need torch: {' '.join(NEEDS_TORCH)}"] if collect_ignore_glob else []


def pytest_collectstart() -> None:
    gc.disable()  # until there is what is imported and collected, which is no garbage


def pytest_collection_finish() -> None:
    """What was imported and collected, some 700,000 objects, need not be walked again and again for garbage."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 10, 10)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same holds for what each file of tests imports. In a process that has run many files, to look through all of
    it takes two seconds. Garbage is collected first, so that a leak shows in the file behind it, not in any later."""
    if item.path != item.session.stash.get(LAST_FILE, None):
        item.session.stash[LAST_FILE] = item.path
        gc.collect()
        gc.freeze()


@pytest.fixture
def plugin_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginSite]:
    """Where a test installs packages with plugins."""
    from kvloom_common.parsers.registry import reasoning_family, tool_family
    from tests.fakes.plugin_site import PluginSite

    yield PluginSite(tmp_path, monkeypatch)
    for families in (tool_family, reasoning_family):  # they remember what was loaded
        families.cache_clear()


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The built-in model (SmolLM2-135M-Instruct), converted once and cached in build/."""
    from shard_server.engines.torch_engine.checkpoint.converted_model import ensure_builtin_model

    return ensure_builtin_model(REPOSITORY / "build" / "models")


@pytest.fixture(scope="session")
def encoder_dir() -> Path:
    """The built-in encoder (all-MiniLM-L6-v2), which `make setup-dev` installs. Tests without it are skipped, except in
    continuous integration."""
    from shard_server.engines.base import EngineError
    from shard_server.engines.torch_engine.checkpoint.converted_model import find_builtin_encoder

    try:
        return find_builtin_encoder()
    except EngineError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def loaded_models() -> LoadedModels:
    from tests.loaded_models import LoadedModels

    return LoadedModels()


@pytest.fixture
def load_runner(loaded_models: LoadedModels) -> Iterator[Callable[..., ModelRunner]]:
    """For TorchEngine: the model is loaded once for many tests. A fixture that closes the engine depends on this
    one."""
    with loaded_models.lending() as load_runner:
        yield load_runner


@pytest.fixture(scope="session")
def postgres_sockets() -> Iterator[Path]:
    """The directory with the socket of a PostgreSQL server. Tests that need it are skipped where PostgreSQL is not
    installed, except in continuous integration."""
    from tests.fakes.postgres_server import find_postgres, postgres_server

    binaries = find_postgres()
    if binaries is None:
        if os.environ.get("CI"):
            raise RuntimeError("PostgreSQL is not installed")
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with postgres_server(binaries) as server:
        yield server.folder


@pytest.fixture
def postgres_url(postgres_sockets: Path) -> str:
    """An empty PostgreSQL database, for `control.database_url`."""
    from tests.fakes.postgres_server import make_postgres_database

    return make_postgres_database(postgres_sockets, f"test-{uuid.uuid4().hex}")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database, likewise: each test runs with both kinds."""
    return f"sqlite:///{tmp_path}/control.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=(pytest.mark.postgres, pytest.mark.long))])
def database_below_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database below what is tested, which is the same whichever kind it is."""
    return f"sqlite:///{tmp_path}/control.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the fabrics of a run that was interrupted: pytest-xdist kills its workers before they can do so."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("tx", None):
        return
    base = str(session.config._tmp_path_factory.getbasetemp())  # as pytest-xdist finds it
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            is_fabric = "up" in (process.info["cmdline"] or ())
            if is_fabric and process.environ().get("KVLOOM_DATA_DIR", "").startswith(base):
                process.terminate()
