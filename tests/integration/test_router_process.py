"""`python -m router` as a process: it starts, announces itself, is found by reflection, and ends cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from kvloom_common.config import KvloomConfig, dump_config, load_config
from kvloom_common.discovery.records import ShardRecord
from kvloom_common.discovery.registry import ShardRegistry
from kvloom_common.process.ready_line import ReadyLine
from tests.fakes.fake_shard import FakeShard, expected_text
from tests.fakes.forked_process import ForkedProcess, fork_service
from tests.fakes.tiny_tokenizer import byte_level_tokenizer

pytest_plugins = ("tests.fakes.router_fixtures",)

TIMEOUT_SECONDS = 20.0


@pytest.fixture
def config_file(tmp_path: Path, router_redis_url: str) -> Path:
    config = KvloomConfig()
    config.model.name = "tiny"
    config.model.path = str(tmp_path)
    config.redis.url = router_redis_url
    config.redis.key_prefix = f"router-process-{tmp_path.name}"
    config.router.port = 0
    config.safety.on_unavailable = "allow"
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "kvloom.json"
    dump_config(config, path)
    return path


@contextlib.asynccontextmanager
async def router_process(config_file: Path, *flags: str) -> AsyncIterator[ForkedProcess]:
    process = await fork_service("router", ("--config", str(config_file), *flags))
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready_line(process: ForkedProcess) -> ReadyLine:
    return msgspec.json.decode(await asyncio.wait_for(process.stdout.readline(), TIMEOUT_SECONDS), type=ReadyLine)


async def grpcurl(*arguments: str) -> str:
    binary = str(Path(sys.executable).parent / "grpcurl")
    process = await asyncio.create_subprocess_exec(
        binary, "-plaintext", *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_SECONDS)
    return output.decode()


async def test_it_starts_serves_by_reflection_and_ends_on_sigterm(config_file: Path, router_redis_url: str) -> None:
    """The whole life of the process, as users and supervisors see it."""
    config = load_config(config_file)
    async with contextlib.AsyncExitStack() as cleanup:
        registry = ShardRegistry(router_redis_url, config.redis.key_prefix)
        cleanup.push_async_callback(registry.close)
        shard = FakeShard("shard-0", model="tiny")
        await shard.start()
        cleanup.push_async_callback(shard.stop)
        flags = ("--metrics-port", "0", "--name", "router-7")
        process = await cleanup.enter_async_context(router_process(config_file, *flags))
        line = await ready_line(process)
        await registry.announce(ShardRecord("shard-0", shard.address, "tiny", "1"))
        await _shard_ready(line)
        await _use_by_reflection(line.address)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), TIMEOUT_SECONDS)
        assert process.returncode == 0, errors.decode()
        assert b"request_ended" in errors
        assert b"Traceback" not in errors


async def _use_by_reflection(address: str) -> None:
    services = await grpcurl(address, "list")
    assert "kvloom.v1.RouterService" in services
    assert "grpc.health.v1.Health" in services
    wanted = {"model": "tiny", "tokenIds": {"ids": [4, 5]}, "stop": {"maxTokens": 6}}
    answer = await grpcurl("-d", json.dumps(wanted), address, "kvloom.v1.RouterService/Generate")
    deltas = [delta for response in _json_documents(answer) for delta in response["deltas"]]
    assert "".join(delta.get("text", "") for delta in deltas) == expected_text([4, 5], 0, 6)
    refusal = await grpcurl("-d", '{"model": "tiny"}', address, "kvloom.v1.RouterService/Generate")
    assert "Code: InvalidArgument" in refusal
    assert '"field":"input"' in refusal.replace(" ", "")


async def _shard_ready(line: ReadyLine) -> None:
    """Waits until the metrics show a ready shard."""
    async with asyncio.timeout(TIMEOUT_SECONDS):
        metrics = ""
        while 'kvloom_router_shards_ready{model="tiny"} 1.0' not in metrics:
            metrics = await asyncio.to_thread(_fetch, f"http://{line.metrics_address}/metrics")


async def test_a_second_router_on_the_same_port_fails_loudly(config_file: Path) -> None:
    """Two processes that share a port unnoticed would each get half of the traffic."""
    async with router_process(config_file) as first:
        port = (await ready_line(first)).address.rpartition(":")[2]
        async with router_process(config_file, "--port", port) as second:
            output, errors = await asyncio.wait_for(second.communicate(), TIMEOUT_SECONDS)
    assert second.returncode == 1
    assert output == b""
    assert f"cannot listen on 127.0.0.1:{port}".encode() in errors
    assert b"Traceback" not in errors


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("model", "path", "nowhere", "cannot load the tokenizer"),
        ("safety", "on_unavailable", "refuse", "safety.port is not set"),
        ("router", "placement", {"policy": "astrology"}, "astrology"),
        ("redis", "url", "", "redis.url is not set"),
    ],
)
async def test_it_reports_why_it_cannot_start(config_file: Path, section: str, key: str, value, message: str) -> None:
    """The operator gets one line instead of a stack trace."""
    _set_key(config_file, section, key, value)
    async with router_process(config_file) as process:
        _, errors = await asyncio.wait_for(process.communicate(), TIMEOUT_SECONDS)
    assert process.returncode == 1
    assert message in errors.decode()
    assert b"Traceback" not in errors


def _set_key(config_file: Path, section: str, key: str, value: object) -> None:
    tree = json.loads(config_file.read_bytes())
    tree[section][key] = value
    config_file.write_text(json.dumps(tree))


def _json_documents(text: str) -> list[dict]:
    decoder, documents = json.JSONDecoder(), []
    while text := text.lstrip():
        document, end = decoder.raw_decode(text)
        documents.append(document)
        text = text[end:]
    return documents


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
        return response.read().decode()
