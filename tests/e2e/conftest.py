"""Fabrics that several end-to-end tests share; each is started once, by the command that users give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fabric import RunningFabric

SIM_STEP_SECONDS = 0.05
"""Long against the way of a cancellation through the processes, so that tests can count steps."""


@pytest.fixture(scope="session")
def sim_fabric(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    step_ms = str(1000 * SIM_STEP_SECONDS)
    fabric = RunningFabric.start(tmp_path_factory.mktemp("sim"), "--engine", "sim", "--sim-step-ms", step_ms)
    yield fabric
    fabric.stop()


@pytest.fixture(scope="session")
def torch_fabric(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    fabric = RunningFabric.start(tmp_path_factory.mktemp("torch"))
    yield fabric
    fabric.stop()
