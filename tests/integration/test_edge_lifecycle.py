"""Clients that disconnect, read too slowly or are too many; a server that starts, drains and stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from edge_http.admission import EdgeSettings
from edge_http.edge import Edge
from edge_http.server.http_server import LEAVE_POLL_SECONDS, LEAVE_SECONDS, EdgeServer
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.config import (
    EdgeConfig,
    FabricConfig,
    KvloomConfig,
    LogConfig,
    ModelConfig,
    OverloadConfig,
    RouterConfig,
    dump_config,
)
from kvloom_common.models.served_model import ServedModel
from kvloom_common.process.service import StartError
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router import serve_fake_router
from tests.fakes.fake_router_link import FakeRouterLink, answer
from tests.fakes.tiny_tokenizer import CHATML, byte_level_tokenizer, model_tokenizer
from tests.waiting import eventually


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


async def connect(world: EdgeWorld, *, receive_buffer_bytes: int = 0, **fields: Any) -> socket.socket:
    """Returns a raw client that has sent a chat request and reads nothing by itself."""
    raw = socket.socket()
    if receive_buffer_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, world.address)
    data = json.dumps(chat_body(**fields)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    await loop.sock_sendall(raw, head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return raw


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
async def test_client_that_goes_away_cancels(world: EdgeWorld, stream: bool, started: bool) -> None:
    """Whether the request is queued or running, streamed or not, it must be cancelled in the engine."""
    raw = await connect(world, stream=stream)
    request = await world.link.next_request()
    if started:
        request.start()
        request.tokens("a")
    raw.close()
    async with asyncio.timeout(5):
        await request.cancelled.wait()
    await eventually(lambda: world.edge.admission.num_running == 0)
    async with world.http.get(f"{world.url}/metrics") as response:
        assert "kvloom_edge_client_disconnects_total 1.0" in await response.text()


async def test_client_that_goes_away_cancels_all_prompts(world: EdgeWorld) -> None:
    """A request with several prompts is several requests to the router, which must all be cancelled."""
    post = asyncio.create_task(world.post("/v1/completions", {"model": "tiny", "prompt": ["a", "b", "c"]}))
    requests = [await world.link.next_request() for _ in range(3)]
    requests[1].finish()
    post.cancel()
    await asyncio.gather(post, return_exceptions=True)
    async with asyncio.timeout(5):
        await asyncio.gather(*(request.cancelled.wait() for request in requests))


async def test_finished_request_is_not_cancelled(world: EdgeWorld) -> None:
    """Each unnecessary cancel would be a frame to the router."""
    world.link.script = answer("x")
    await world.chat()
    await world.chat(stream=False, n=2)
    assert not any(request.cancelled.is_set() for request in world.link.requests)


async def test_error_of_one_prompt_cancels_the_others(world: EdgeWorld) -> None:
    """The answer is an error, so the other prompts' answers are not needed."""
    post = asyncio.create_task(world.post("/v1/completions", {"model": "tiny", "prompt": ["a", "b"]}))
    first, second = [await world.link.next_request() for _ in range(2)]
    first.start()
    second.fail(41, "engine failed")
    status, body = await post
    assert (status, body["error"]["code"]) == (500, "engine_failed")
    assert first.cancelled.is_set()


async def test_slow_reader_is_bounded_and_cut_off() -> None:
    """A reader that stalls first fills a bounded buffer and then loses its request; others continue to stream."""
    async with edge_world(EdgeSettings(max_buffered_bytes=64 * 1024)) as world:
        raw = await connect(world, receive_buffer_bytes=4096, stream=True)
        slow = await world.link.next_request()
        slow.start()
        delta = "x" * 1000
        num_sent = 0
        while not slow.cancelled.is_set():
            slow.tokens(delta)
            num_sent += 1
            assert num_sent < 50_000, "the slow reader was never cut off"
            if num_sent % 10 == 0:
                await asyncio.sleep(0)  # As in reality, frames arrive in different turns of the event loop.
        world.link.script = answer("fine")
        status, _ = await world.chat(stream=False)
        assert status == 200
        # When the slow reader reads again it gets complete events, then the error and the end of the connection.
        received = b""
        async with asyncio.timeout(5):
            while piece := await asyncio.get_running_loop().sock_recv(raw, 1 << 16):
                received += piece
        raw.close()
        assert received.endswith(b"\r\n0\r\n\r\n")
        last_event = received.split(b"\n\n")[-2].split(b"data: ")[1]
        assert json.loads(last_event)["error"]["code"] == "client_too_slow"
        async with world.http.get(f"{world.url}/metrics") as response:
            assert "kvloom_edge_slow_clients_total 1.0" in await response.text()


async def test_stuck_reader_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that never reads again must not hold its connection for ever."""
    monkeypatch.setattr("edge_http.answers.streamed_answer.SLOW_CLIENT_LINGER_SECONDS", 0.05)
    async with edge_world(EdgeSettings(max_buffered_bytes=64 * 1024)) as world:
        raw = await connect(world, receive_buffer_bytes=4096, stream=True)
        stuck = await world.link.next_request()
        while not stuck.cancelled.is_set():
            stuck.tokens("x" * 10_000)
            await asyncio.sleep(0)
        connections = world.server._runner.server
        assert connections is not None
        await eventually(lambda: not connections.connections)
        raw.close()


async def test_requests_over_the_limit_are_refused() -> None:
    """Beyond max_concurrent_requests a client is rejected at once, with the time after which to retry."""
    async with edge_world(EdgeConfig(max_concurrent_requests=1)) as world:
        first = asyncio.create_task(world.chat())
        request = await world.link.next_request()
        async with world.http.post(f"{world.url}/v1/chat/completions", json=chat_body()) as response:
            assert response.status == 429
            assert (await response.json())["error"]["code"] == "queue_full"
            assert response.headers["Retry-After"] == "1"
        request.finish()
        assert (await first)[0] == 200
        world.link.script = answer("x")
        assert (await world.chat())[0] == 200


async def test_router_that_goes_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait has a deadline, so the edge ends a request that the router has forgotten."""
    monkeypatch.setattr("edge_http.submission.ROUTER_GRACE_SECONDS", 0.01)
    async with edge_world(KvloomConfig(fabric=FabricConfig(request_timeout_seconds=0.05))) as world:
        status, body = await world.chat()
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        assert world.link.requests[0].cancelled.is_set()


async def test_readiness_follows_the_fleet(world: EdgeWorld) -> None:
    """Load balancers and `kvloom up` wait for the first 200."""

    async def ready() -> tuple[int, str]:
        async with world.http.get(f"{world.url}/ready") as response:
            return response.status, (await response.json()).get("reason", "")

    assert await ready() == (200, "")
    for fleet, reason in (
        (FleetState(), "no shard is ready"),
        (FleetState(models=[ModelInfo(name="tiny", num_ready_shards=0)]), "no shard is ready"),
        (FleetState(models=[ModelInfo(name="tiny", num_ready_shards=1)], draining=True), "the router is draining"),
    ):
        world.link.fleet = fleet
        assert await ready() == (503, reason)


async def test_an_edge_is_ready_for_a_model_that_is_scaled_to_zero() -> None:
    """Requests wait in the router for the shard that they start: with an edge that took none, none would start."""
    router = RouterConfig(overload=OverloadConfig(start_patience_seconds=60.0))
    async with edge_world(KvloomConfig(router=router)) as world:
        world.link.fleet = FleetState()
        async with world.http.get(f"{world.url}/ready?model=tiny") as response:
            assert response.status == 200


async def test_drain_finishes_what_runs_and_refuses_what_comes(world: EdgeWorld) -> None:
    """A deployment loses no answer: running streams are finished, and new requests are served elsewhere."""
    running = asyncio.create_task(world.chat())
    request = await world.link.next_request()
    drain = asyncio.create_task(world.server.drain())
    await eventually(lambda: world.edge.admission.draining)
    status, body = await world.chat()
    assert (status, body["error"]["code"]) == (503, "draining")
    async with world.http.get(f"{world.url}/ready") as response:
        assert response.status == 503
        assert response.headers["Connection"] == "close"
    assert not drain.done()
    request.tokens("done")
    request.finish()
    assert (await running)[1]["choices"][0]["message"]["content"] == "done"
    async with asyncio.timeout(5):
        await drain


async def test_a_client_answered_during_the_drain_may_ask_once_more() -> None:
    """The answer began before the drain and announced that its connection stays open. The next request over it must not
    be rejected because the answer took longer than idle connections are waited for. Then the connection closes."""
    loop = asyncio.get_running_loop()
    link = FakeRouterLink()
    edge = Edge(KvloomConfig(), link, {"tiny": ServedModel("tiny", model_tokenizer(), 1, "fp")})
    server = EdgeServer(edge)
    address = await server.take_over(socket.create_server(("127.0.0.1", 0)))
    try:
        async with aiohttp.ClientSession(f"http://{address}") as http:
            asked = asyncio.create_task(http.post("/v1/chat/completions", json=chat_body(stream=True)))
            request = await link.next_request()
            request.start()
            request.tokens("a")
            answered = await asked
            leaving = asyncio.create_task(server.drain())
            begun = loop.time()
            await eventually(lambda: loop.time() > begun + LEAVE_SECONDS)
            request.finish()
            assert b"[DONE]" in await answered.read()
            ended = loop.time()
            await eventually(lambda: loop.time() > ended + 3 * LEAVE_POLL_SECONDS)
            link.script = answer("b")
            async with http.post("/v1/chat/completions", json=chat_body()) as again:
                assert again.status == 200
                assert again.headers["Connection"] == "close"
        await asyncio.wait_for(leaving, 5)
    finally:
        await server.stop()


async def test_clients_are_accepted_until_others_have_been_told_to_accept_them() -> None:
    """Another process holds the socket too, which must stop listening, or clients would wait in it for ever. Those that
    connect before it knows are lost if nobody accepts them: they are reset when it closes the socket."""
    link = FakeRouterLink()
    edge = Edge(KvloomConfig(), link, {"tiny": ServedModel("tiny", model_tokenizer(), 1, "fp")})
    server = EdgeServer(edge)
    listener = socket.create_server(("127.0.0.1", 0))
    held_elsewhere = listener.dup()
    address = await server.take_over(listener)
    told = asyncio.Event()
    draining = asyncio.create_task(server.drain(told.set))
    try:
        async with asyncio.timeout(5), aiohttp.ClientSession(f"http://{address}") as http:
            await told.wait()
            link.script = answer("b")
            async with http.post("/v1/chat/completions", json=chat_body()) as answered:
                assert answered.status == 200
                assert answered.headers["Connection"] == "close"
            held_elsewhere.close()
            await draining
            with pytest.raises(aiohttp.ClientConnectorError):
                await http.post("/v1/chat/completions", json=chat_body())
    finally:
        await server.stop()


async def test_drain_gives_up_at_its_timeout() -> None:
    """A request that does not end is cancelled in the engine when the server stops."""
    config = KvloomConfig(fabric=FabricConfig(drain_timeout_seconds=0.05))
    async with edge_world(config, shutdown_seconds=0.05) as world:
        running = asyncio.create_task(world.chat())
        request = await world.link.next_request()
        await world.server.drain()
        await world.server.stop()
        assert request.cancelled.is_set()
        await asyncio.gather(running, return_exceptions=True)


async def test_port_that_is_taken(world: EdgeWorld) -> None:
    """Two servers on one port would share clients at random."""
    second = EdgeServer(Edge(KvloomConfig(), FakeRouterLink(), {}))
    with pytest.raises(StartError, match="cannot listen"):
        await second.listen(*world.address)


async def test_tokens_leave_without_delay(world: EdgeWorld) -> None:
    """Nagle's algorithm would delay small events by 40 ms."""
    raw = await connect(world, stream=True)
    await world.link.next_request()
    runner = world.server._runner.server
    assert runner is not None
    transport = runner.connections[0].transport
    assert transport is not None
    accepted = transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    raw.close()


async def test_metrics_count_requests_with_bounded_labels(world: EdgeWorld) -> None:
    """Unknown paths and models that clients send must not become labels."""
    world.link.script = answer("a", "b")
    await world.chat()
    await world.chat(model="made-up")
    async with world.http.get(f"{world.url}/made/up") as response:
        assert response.status == 404
    async with world.http.get(f"{world.url}/metrics") as response:
        text = await response.text()
    assert 'kvloom_edge_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'kvloom_edge_requests_total{route="unknown",status="404"} 1.0' in text
    assert 'kvloom_edge_output_tokens_total{model="tiny"} 2.0' in text
    labels = 'gen_ai_operation_name="chat",gen_ai_request_model="tiny"'
    assert f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}} 1.0" in text
    assert f'gen_ai_client_token_usage_sum{{{labels},gen_ai_token_type="output"}} 2.0' in text
    assert "made" not in text


async def test_page_is_self_contained(world: EdgeWorld) -> None:
    """The chat page works offline and runs no code but its own."""
    for path, content_type in (("/", "text/html"), ("/chat.js", "text/javascript"), ("/chat.css", "text/css")):
        async with world.http.get(world.url + path) as response:
            text = await response.text()
            assert response.content_type == content_type
            assert response.headers["Content-Security-Policy"].startswith("default-src 'self'")
            assert "http://" not in text
            assert "https://" not in text
            assert "innerHTML" not in text
            etag = response.headers["ETag"]
        async with world.http.get(world.url + path, headers={"If-None-Match": etag}) as response:
            assert response.status == 304


@contextlib.asynccontextmanager
async def edge_process(
    tmp_path: Path, *arguments: str, router_port: int = 1
) -> AsyncIterator[asyncio.subprocess.Process]:
    model_dir = tmp_path / "model"
    model_dir.mkdir(exist_ok=True)
    byte_level_tokenizer().save(str(model_dir / "tokenizer.json"))
    (model_dir / "chat_template.jinja").write_text(CHATML)
    config = KvloomConfig(
        model=ModelConfig(name="tiny", path=str(model_dir)),
        router=RouterConfig(port=router_port),
        log=LogConfig(format="json"),
    )
    dump_config(config, tmp_path / "config.json")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "edge_http", "--config", str(tmp_path / "config.json"), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_process_announces_itself_and_stops_on_sigterm(world: EdgeWorld, tmp_path: Path) -> None:
    """`kvloom up` reads the ready line and ends processes with SIGTERM, after which they exit with status 0."""
    async with edge_process(tmp_path, "--port", "0") as process, asyncio.timeout(20):
        assert process.stdout is not None
        line = json.loads(await process.stdout.readline())
        assert line["event"] == "ready"
        async with world.http.get(f"http://{line['address']}/ready") as response:
            assert response.status == 503
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_process_with_a_taken_port_reports_it(world: EdgeWorld, tmp_path: Path) -> None:
    """It exits with status 1 and prints one line for the operator, without a stack trace."""
    async with serve_fake_router() as (router, address):
        router.fleet.models[0].name = "tiny"  # an edge that can't serve yet waits before it listens
        router_port = int(address.rpartition(":")[2])
        port = str(world.address[1])
        async with edge_process(tmp_path, "--port", port, router_port=router_port) as process, asyncio.timeout(20):
            _, stderr = await process.communicate()
    assert process.returncode == 1
    assert b"cannot listen on" in stderr
    assert b"Traceback" not in stderr
