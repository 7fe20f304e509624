"""Fixtures that more than one kind of test needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from shard_server.engines.torch_engine.model_runner import ModelRunner
    from tests.loaded_models import LoadedModels

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The built-in model (SmolLM2-135M-Instruct), converted once and cached in build/."""
    from shard_server.engines.torch_engine.builtin_model import ensure_builtin_model

    return ensure_builtin_model(REPOSITORY / "build" / "models")


@pytest.fixture(scope="session")
def loaded_models() -> LoadedModels:
    from tests.loaded_models import LoadedModels

    return LoadedModels()


@pytest.fixture
def load_runner(loaded_models: LoadedModels) -> Iterator[Callable[..., ModelRunner]]:
    """For TorchEngine: the model is loaded once for many tests. Whoever closes the engine depends on this."""
    with loaded_models.lending() as load_runner:
        yield load_runner


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the fabrics of a run that was interrupted: pytest-xdist kills its workers before they can do so."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("tx", None):
        return
    base = str(session.config._tmp_path_factory.getbasetemp())  # as pytest-xdist finds it  # pyright: ignore
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            is_fabric = "up" in (process.info["cmdline"] or ())
            if is_fabric and process.environ().get("KVLOOM_DATA_DIR", "").startswith(base):
                process.terminate()
