"""Fixtures that more than one kind of test needs."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The built-in model (SmolLM2-135M-Instruct), converted once and cached in build/."""
    from shard_server.engines.torch_engine.builtin_model import ensure_builtin_model

    return ensure_builtin_model(REPOSITORY / "build" / "models")
