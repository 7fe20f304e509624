"""Processes of the last release and of this version serve together: a fabric is upgraded one process at a time
(docs/operate/upgrade.md)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer
from lab.free_ports import pick_free_ports
from shard_server.engines.sim_engine import expected_token_id
from tests.fakes.redis_server import redis_server
from tests.fakes.resuming_client import ResumingClient
from tests.fakes.small_model import write_small_model
from tests.releases import build, export_last_release
from tests.waiting import eventually

pytestmark = pytest.mark.long  # a matter of releases

MODEL = "tiny"
NUM_TOKENS = 60
NUM_STREAMS = 12
STARTED_SECONDS = 60.0
ROLES = {
    "edge": ("edge_http", "--port", "0"),
    "router": ("router", "--port", "0"),
    "safety": ("safety_svc",),
    "shard": ("shard_server",),
}
PROCESSES = ("safety-0", "router-0", "shard-0", "shard-1", "edge-0", "edge-1")


@pytest.fixture(scope="module")
def last_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheels of the last release install."""
    folder = tmp_path_factory.mktemp("last release")
    source, wheels, site = (folder / name for name in ("source", "wheels", "site"))
    export_last_release(source)
    wheels.mkdir()
    for project in (source, source / "fabric"):
        with zipfile.ZipFile(build("wheel", project, wheels)) as wheel:
            wheel.extractall(site)
    where = "import kvloom_fabric, kvloom; kvloom_fabric.import_from_root(); import router; print(kvloom, router)"
    shown = subprocess.run(
        [sys.executable, "-P", "-c", where],
        env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=60.0, check=True,
    )  # fmt: skip
    assert shown.stdout.count(str(site)) == 2
    return site


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(model_folder: Path) -> Iterator[ModelTokenizer]:
    loaded = ModelTokenizer.load(model_folder)
    yield loaded
    loaded.close()


class MixedFabric:
    """Processes of both versions with one Redis."""

    def __init__(self, config: Path, last_release: Path, old: frozenset[str]) -> None:
        """`old`: the names of those that are of the last release."""
        self._config = config
        self._last_release = last_release
        self._old = old
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self.addresses: dict[str, str] = {}

    async def start(self, name: str) -> None:
        service, *flags = ROLES[name.partition("-")[0]]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if name in self._old:
            env["PYTHONPATH"] = str(self._last_release)
        with (self._config.parent / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "kvloom_fabric", service, "--config", str(self._config)),
                *("--name", name, *flags),
                stdout=asyncio.subprocess.PIPE, stderr=log, env=env, cwd=self._config.parent,
            )  # fmt: skip
        self._processes[name] = process
        assert process.stdout is not None
        async with asyncio.timeout(STARTED_SECONDS):
            line = await process.stdout.readline()
        assert line, (self._config.parent / f"{name}.log").read_text()
        self.addresses[name] = json.loads(line)["address"]

    async def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        await process.communicate()

    async def stop(self) -> str:
        """Returns what all of them have logged."""
        for process in self._processes.values():
            process.terminate()
        async with asyncio.timeout(STARTED_SECONDS):
            await asyncio.gather(*(process.communicate() for process in self._processes.values()))
        self._processes.clear()
        return "".join(path.read_text() for path in self._config.parent.glob("*.log"))

    def url(self, edge: str) -> str:
        return f"http://{self.addresses[edge]}"

    async def is_ready(self, edge: str) -> bool:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url(edge)}/ready") as response:
            return response.status == 200

    async def num_ready_shards(self, edge: str) -> int:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url(edge)}/v1/models") as response:
            return sum(model["num_ready_shards"] for model in (await response.json())["data"])


@contextlib.asynccontextmanager
async def mixed_fabric(
    folder: Path, model_folder: Path, last_release: Path, old: frozenset[str]
) -> AsyncIterator[MixedFabric]:
    """The safety service must be there for requests to be served, so that its messages count too."""
    with redis_server() as redis:
        (port,) = pick_free_ports(1)
        config = folder / "kvloom.json"
        settings = {
            "model": {"name": MODEL, "path": str(model_folder)},
            "redis": {"url": redis.connection_url},
            "safety": {"port": port, "on_unavailable": "refuse"},
            "shard": {"engine": "sim", "sim": {"step_ms": 20.0}},
        }
        config.write_text(json.dumps(settings))
        fabric = MixedFabric(config, last_release, old)
        try:
            await asyncio.gather(*map(fabric.start, PROCESSES))
            for edge in ("edge-0", "edge-1"):
                await eventually(lambda edge=edge: fabric.is_ready(edge), "an edge is ready")

                async def has_both(edge: str = edge) -> bool:
                    return await fabric.num_ready_shards(edge) == 2

                await eventually(has_both, "both shards are ready")
            yield fabric
        finally:
            logged = await fabric.stop()
        assert "Traceback" not in logged


OLD = {
    "router": frozenset({"router-0"}),
    "all but the router": frozenset(PROCESSES) - {"router-0"},
    "one of each pair": frozenset({"shard-1", "edge-1"}),
    "the other of each pair": frozenset({"shard-0", "edge-0", "safety-0"}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("old", OLD.values(), ids=OLD)
async def test_both_versions_serve_together(
    old: frozenset[str], last_release: Path, model_folder: Path, tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    """Streams that are resumed at another edge, and whose shard dies, arrive whole: edge, router, shard and safety
    service understand one another, and so do two edges, two shards and what is stored in Redis, whichever is older."""
    async with mixed_fabric(tmp_path, model_folder, last_release, old) as fabric:
        clients = [ResumingClient(f"{fabric.url('edge-0')}/v1/chat/completions") for _ in range(NUM_STREAMS)]

        def body(i: int) -> dict[str, object]:
            messages = [{"role": "user", "content": f"Question {i}"}]
            return {"model": MODEL, "stream": True, "max_tokens": NUM_TOKENS, "seed": i, "messages": messages}

        await asyncio.gather(*(client.begin(body(i), stop_after=4 + i) for i, client in enumerate(clients)))
        await fabric.kill("shard-0")
        await fabric.kill("edge-0")
        for client in clients:
            assert client.status == 200, client.notices
            client.url = f"{fabric.url('edge-1')}/v1/chat/completions"
        await asyncio.gather(*(client.read_to_the_end() for client in clients))
        for i, client in enumerate(clients):
            prompt_ids, _ = await tokenizer.encode_chat([ChatMessage("user", f"Question {i}")])
            expected = tokenizer.decode([expected_token_id(prompt_ids, i, at) for at in range(NUM_TOKENS)])
            chunks = [json.loads(event) for event in client.events[:-1]]
            deltas = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
            assert "".join(deltas) == expected
