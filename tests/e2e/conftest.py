"""Fabrics that several end-to-end tests share; each is started once, by the command that users give."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, async_playwright

from tests.e2e.fabric import RunningFabric

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SIM_STEP_SECONDS = 0.05
"""Long against the way of a cancellation through the processes, so that tests can count steps."""


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and with them all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope="session")
def control_fabric(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    """With tenants. Tests use organisations of their own."""
    options = ("--engine", "sim", "--shards", "1", "--control")
    fabric = RunningFabric.start(tmp_path_factory.mktemp("control"), *options)
    yield fabric
    fabric.stop()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is not installed")
        pytest.skip("chromium is not installed")
    arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"]
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        await started.close()
