"""The recipes of docs/how-to/clients.md run as they are printed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.breaking_proxy import BreakingProxy
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import FakeRequest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "how-to" / "clients.md"
NODE_MODULES = REPOSITORY / "tests" / "clients" / "node" / "node_modules"
"""Installed by `make test-clients`."""
RECIPES = {
    "node: fetch": ("node", ("recipe.mjs",)),
    "node: openai": ("node", ("recipe.mjs",)),
    "go: stream": ("go", ("run", "recipe.go")),
}
RESUMING = ("node: fetch", "go: stream")


@contextlib.asynccontextmanager
async def behind_proxy(world: EdgeWorld) -> AsyncIterator[tuple[BreakingProxy, asyncio.Queue[FakeRequest]]]:
    """A proxy before the edge, whose connections a test breaks, and the requests that arrive behind it."""
    requests: asyncio.Queue[FakeRequest] = asyncio.Queue()
    world.link.script = requests.put_nowait
    proxy = BreakingProxy(world.url.removeprefix("http://"))
    await proxy.start()
    try:
        yield proxy, requests
    finally:
        await proxy.stop()


@contextlib.asynccontextmanager
async def running(
    name: str, folder: Path, url: str, changed: tuple[str, str] = ("", "")
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The recipe's process, against the server at `url`. `changed`: a text of it, and another in its place."""
    program, arguments = RECIPES[name]
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    if program == "go" and not os.environ.get("KVLOOM_TEST_CLIENTS"):
        pytest.skip("KVLOOM_TEST_CLIENTS is not set: Go compiles its library for half a minute")
    found = re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    if 'from "openai"' in found[1]:
        if not (NODE_MODULES / "openai").exists():
            pytest.skip("the openai package for Node is not installed: `make test-clients` does so")
        (folder / "node_modules").symlink_to(NODE_MODULES)
    assert changed[0] in found[1]
    (folder / arguments[-1]).write_text(found[1].replace(*changed) if changed[0] else found[1])
    environment = {**os.environ, "KVLOOM_URL": url, "KVLOOM_MODEL": "tiny"}
    environment |= {"GOCACHE": str(folder.parent / "go-cache"), "GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local"}
    process = await asyncio.create_subprocess_exec(
        path, *arguments, cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RECIPES)
async def test_recipe_prints_the_answer(name: str, tmp_path: Path) -> None:
    """A recipe that does not run is worse than none; and those that promise it survive a broken connection."""
    async with (
        edge_world() as world,
        behind_proxy(world) as (proxy, requests),
        running(name, tmp_path, f"http://{proxy.address}") as process,
        asyncio.timeout(240),
    ):
        assert process.stdout is not None
        request = await requests.get()
        request.start()
        request.tokens("Hel")
        assert await process.stdout.readexactly(3) == b"Hel"
        if name in RESUMING:
            assert proxy.reset()
        request.tokens("lo")
        request.finish()
        assert await process.stdout.read() == b"lo"
        assert await process.wait() == 0


async def test_an_aborted_recipe_ends_its_answer(tmp_path: Path) -> None:
    """A resumable answer outlives its connection: a user's stop has to reach the server."""
    stopping = ("process.stdout.write(text);", "stop.abort();")
    async with (
        edge_world() as world,
        behind_proxy(world) as (proxy, requests),
        running("node: fetch", tmp_path, f"http://{proxy.address}", stopping),
        asyncio.timeout(60),
    ):
        request = await requests.get()
        request.start()
        request.tokens("Hel")
        await request.cancelled.wait()
