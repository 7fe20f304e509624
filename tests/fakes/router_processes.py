"""Real router processes in front of simulated shards, for tests that kill routers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from kvloom.router_link.group import RouterGroup
from kvloom_common.config import KvloomConfig, dump_config
from kvloom_common.discovery.router_finder import linked_routers
from kvloom_common.process.ready_line import ReadyLine
from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.sim_engine import SimEngine
from shard_server.server import ShardServer
from tests.fakes.forked_process import ForkedProcess, fork_service
from tests.fakes.small_model import write_small_model
from tests.waiting import eventually

MODEL = "tiny"
TIMEOUT_SECONDS = 30.0
STEP_MS = 8.0
"""An answer of 50 tokens lasts long enough for a test that has seen five of them to break something."""

_prefixes = itertools.count(1)


class SplitCharacters:
    """The shards' tokenizer: some characters' bytes are split over two tokens, and some never become complete."""

    _pieces = (b" w", b"\xf0\x9f", b"\x99\x82", "é".encode())

    def __init__(self, vocab_size: int) -> None:
        pieces = (" w", None, None, "é")
        self.token_texts: Sequence[str | None] = [pieces[i % 4] for i in range(vocab_size)]

    def shown_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id % 4]

    token_bytes = shown_bytes


class RouterProcess:
    def __init__(self, name: str, process: ForkedProcess, address: str) -> None:
        self.name = name
        self.address = address
        self._process = process

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def kill(self) -> None:
        """Kills the process with SIGKILL."""
        if self._process.returncode is None:
            self._process.kill()
        await asyncio.wait_for(self._process.communicate(), TIMEOUT_SECONDS)

    def send(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    async def wait(self) -> tuple[int, str]:
        """Returns (exit status, stderr)."""
        _, errors = await asyncio.wait_for(self._process.communicate(), TIMEOUT_SECONDS)
        return self._process.returncode or 0, errors.decode()


class RouterProcesses:
    def __init__(self, folder: Path, redis_url: str) -> None:
        model_dir = write_small_model(folder / "model")
        self.config = KvloomConfig()
        self.config.model.name = MODEL
        self.config.model.path = str(model_dir)
        self.config.redis.url = redis_url
        self.config.redis.key_prefix = f"routers-{folder.name}-{next(_prefixes)}"
        self.config.safety.on_unavailable = "allow"
        self.config.router.port = 0
        self.config.shard.engine = "sim"
        self.config.shard.sim.step_ms = STEP_MS
        self.tokenizer = ModelTokenizer.load(model_dir)
        self._folder = folder
        self._engines: list[SimEngine] = []
        self.cleanup = contextlib.AsyncExitStack()

    async def decoded(self, num_steps: int) -> None:
        """Returns when one of the shards has made that many steps more."""
        wanted = [engine._step_number + num_steps for engine in self._engines]
        steps = list(zip(self._engines, wanted, strict=True))
        await eventually(lambda: any(engine._step_number >= number for engine, number in steps), "steps of a shard")

    async def start_shard(self, shard_id: str) -> None:
        engine = SimEngine(MODEL, self.config.shard, self.tokenizer.vocab_size, self.tokenizer.eos_token_ids)
        self._engines.append(engine)
        metrics = CollectorRegistry()
        texts = SplitCharacters(self.tokenizer.vocab_size)
        server = ShardServer(self.config, engine, texts, shard_id, metrics_registry=metrics)
        await server.start()
        stop = asyncio.Event()
        serving = asyncio.create_task(server.serve(stop))

        async def end() -> None:
            stop.set()
            await asyncio.wait_for(serving, TIMEOUT_SECONDS)

        self.cleanup.push_async_callback(end)

    async def start_router(self, name: str, port: int = 0) -> RouterProcess:
        path = self._folder / "kvloom.json"
        dump_config(self.config, path)
        flags = ("--config", str(path), "--name", name, "--port", str(port))
        process = await fork_service("router", flags)
        line = await asyncio.wait_for(process.stdout.readline(), TIMEOUT_SECONDS)
        router = RouterProcess(name, process, msgspec.json.decode(line, type=ReadyLine).address)
        self.cleanup.push_async_callback(router.kill)
        return router

    async def link(self, num_routers: int) -> RouterGroup:
        """Returns a link as an edge has it, once all routers have been found in the registry and know the shards."""
        group = await self.cleanup.enter_async_context(linked_routers(self.config, "test"))
        await eventually(lambda: len(ready_routers(group)) == num_routers, f"{num_routers} routers")
        return group


def ready_routers(group: RouterGroup) -> list[str]:
    return [member.address for member in group._members.available if MODEL in member.ready_models]


@contextlib.asynccontextmanager
async def router_processes(folder: Path, redis_url: str) -> AsyncIterator[RouterProcesses]:
    """Starts two shards; tests start the routers."""
    world = RouterProcesses(folder, redis_url)
    try:
        await world.start_shard("shard-0")
        await world.start_shard("shard-1")
        yield world
    finally:
        await world.cleanup.aclose()
        world.tokenizer.close()
