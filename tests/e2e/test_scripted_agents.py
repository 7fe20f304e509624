"""The session of an agent whose requests are played (goose's) against a fabric with the scripted engine: what
`make test-clients` does with installed agents, without what it installs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.run_agents import AGENTS, check

pytestmark = pytest.mark.long


async def test_goose_works_through_its_session(tmp_path: Path, model_dir: Path) -> None:
    """Names with two underscores, null content beside calls, results of calls that were cut off, images that follow."""
    assert model_dir
    [goose] = [agent for agent in AGENTS if agent.name == "goose"]
    outcomes = await check(goose, tmp_path)
    assert all(outcomes.values()), outcomes
    assert len(outcomes) == 7
