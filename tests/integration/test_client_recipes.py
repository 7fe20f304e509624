"""The recipes of docs/clients.md run as they are printed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.fakes.edge_world import edge_world
from tests.fakes.fake_router_link import answer

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
RECIPES = {"node: fetch": ("node", ("recipe.mjs",)), "go: stream": ("go", ("run", "recipe.go"))}


@pytest.mark.parametrize("name", RECIPES)
async def test_recipe_prints_the_answer(name: str, tmp_path: Path) -> None:
    """A recipe that does not run is worse than none."""
    program, arguments = RECIPES[name]
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    if program == "go" and not os.environ.get("KVLOOM_TEST_CLIENTS"):
        pytest.skip("KVLOOM_TEST_CLIENTS is not set: Go compiles its library for half a minute")
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / arguments[-1]).write_text(found[1])
    async with edge_world() as world:
        world.link.script = answer("Hel", "lo")
        environment = {**os.environ, "KVLOOM_URL": world.url, "KVLOOM_MODEL": "tiny"}
        environment |= {"GOCACHE": str(tmp_path / "cache"), "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local"}
        process = await asyncio.create_subprocess_exec(
            path, *arguments, cwd=tmp_path, env=environment, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(180):
            output, _ = await process.communicate()
    assert (process.returncode, output) == (0, b"Hello")
