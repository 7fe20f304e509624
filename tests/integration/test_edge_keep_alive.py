"""Streams that have nothing to send for a while, behind proxies that cut connections which are idle."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from edge_http.admission import EdgeSettings
from kvloom.v1.error_reason_pb2 import ErrorReason
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world

pytestmark = pytest.mark.xdist_group("anthropic")  # which takes seconds to import

COMMENT = b": keep-alive\n"
PING = b"event: ping\n"
FAST = 0.03
CUT_SECONDS = 0.6
NUM_STEPS = 6


class CuttingProxy:
    """Forwards bytes, and cuts a connection over which no byte has come from the server for `CUT_SECONDS`; if it
    `waits_for_head_only`, only while none has come at all."""

    def __init__(self, port: int, *, waits_for_head_only: bool = False) -> None:
        self._port = port
        self._waits_for_head_only = waits_for_head_only
        self.seen = bytearray()
        """What the server has sent."""
        self.more = asyncio.Event()
        self.num_cut = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._port)

        async def forward() -> None:
            while data := await reader.read(65536):
                back_writer.write(data)

        forwarding = asyncio.create_task(forward())
        try:
            while data := await self._read(back_reader):
                self.seen += data
                self.more.set()
                writer.write(data)
        except TimeoutError:
            self.num_cut += 1
        finally:
            forwarding.cancel()
            writer.close()
            back_writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """What comes next. Raises TimeoutError. Time is counted in steps: while this process does something else, such
        as making the types of a client, the server cannot send either."""
        if self._waits_for_head_only and self.seen:
            return await reader.read(65536)
        for _ in range(NUM_STEPS - 1):
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(reader.read(65536), CUT_SECONDS / NUM_STEPS)
        return await asyncio.wait_for(reader.read(65536), CUT_SECONDS / NUM_STEPS)

    async def seen_times(self, what: bytes, num_times: int) -> None:
        while self.seen.count(what) < num_times:
            self.more.clear()
            await self.more.wait()


@contextlib.asynccontextmanager
async def behind_proxy(world: EdgeWorld, **options: bool) -> AsyncIterator[tuple[CuttingProxy, str]]:
    proxy = CuttingProxy(world.address[1], **options)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    async with server:
        yield proxy, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def slow_world(seconds: float = FAST, head_seconds: float = 0) -> AsyncIterator[EdgeWorld]:
    config = EdgeSettings(stream_keep_alive_seconds=seconds, stream_head_seconds=head_seconds)
    async with edge_world(config=config) as started:
        yield started


async def answered_slowly(world: EdgeWorld, proxy: CuttingProxy, mark: bytes) -> None:
    """The first token comes after a silence that is longer than the proxy allows, and so does the second."""
    request = await world.link.next_request()
    enough = int(CUT_SECONDS / FAST)
    await proxy.seen_times(mark, enough)
    request.start()
    request.tokens("Hel")
    await proxy.seen_times(mark, 2 * enough)
    request.tokens("lo")
    request.finish()


async def test_a_slow_stream_passes_a_proxy_that_cuts_idle_connections() -> None:
    """Before the first token, which on a slow model takes minutes, and between tokens."""
    async with slow_world() as world, behind_proxy(world) as (proxy, url):
        slow = asyncio.create_task(answered_slowly(world, proxy, COMMENT))
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x"}], stream=True
            )
            text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        await slow
        assert "".join(text) == "Hello"
        assert proxy.num_cut == 0


async def test_messages_get_pings() -> None:
    """Anthropic's API has an event for it, which its clients leave out."""
    import anthropic

    async with slow_world() as world, behind_proxy(world) as (proxy, url):
        slow = asyncio.create_task(answered_slowly(world, proxy, PING))
        client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        asked = client.messages.stream(model="tiny", max_tokens=9, messages=[{"role": "user", "content": "x"}])
        async with client, asked as stream:
            text = await stream.get_final_text()
        await slow
        assert text == "Hello"
        assert proxy.num_cut == 0


async def test_without_it_the_proxy_cuts_the_stream() -> None:
    """So the test above shows something."""
    async with slow_world(0) as world, behind_proxy(world) as (proxy, url):
        with pytest.raises(aiohttp.ClientError):
            async with world.http.post(f"{url}/v1/chat/completions", json=chat_body(stream=True)) as response:
                await response.read()
        assert proxy.num_cut == 1
        assert not proxy.seen


async def test_events_of_a_resumable_stream_keep_their_numbers() -> None:
    """A comment is no event: a client that returns asks for what follows the last number that it has. OpenAI's client
    takes an empty line behind an event's number for another event."""
    async with slow_world() as world, behind_proxy(world) as (proxy, url):
        slow = asyncio.create_task(answered_slowly(world, proxy, COMMENT))
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "x"}],
                stream=True,
                extra_headers={"x-kvloom-resume": "on"},
            )
            text = [chunk.choices[0].delta.content or "" async for chunk in stream]
        await slow
        assert "".join(text) == "Hello"
        numbers = [int(line[4:]) for line in bytes(proxy.seen).split(b"\n") if line.startswith(b"id: ")]
        assert numbers == list(range(1, len(numbers) + 1))


async def test_an_early_refusal_keeps_its_status_and_a_late_one_is_an_event() -> None:
    """Nearly all refusals come at once, and clients retry by their status; after a comment there is none left."""
    async with slow_world() as world:
        posted = world.http.post(f"{world.url}/v1/chat/completions", json=chat_body(stream=True))
        task: asyncio.Task[Any] = asyncio.create_task(posted.__aenter__())
        (await world.link.next_request()).fail(ErrorReason.ERROR_REASON_QUEUE_FULL)
        response = await task
        assert response.status in (429, 503)
        async with world.http.post(f"{world.url}/v1/chat/completions", json=chat_body(stream=True)) as response:
            assert response.status == 200
            (await world.link.next_request()).fail(ErrorReason.ERROR_REASON_QUEUE_FULL)
            lines = (await response.text()).split("\n")
        data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert [set(each) for each in data] == [{"error"}]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("resume", ["on", "off"])
async def test_a_slow_stream_passes_a_proxy_that_waits_for_a_head(path: str, resume: str) -> None:
    """Some proxies give a server a few seconds for its status line. The first comment may come too late for them."""
    async with slow_world(0, FAST) as world, behind_proxy(world, waits_for_head_only=True) as (proxy, url):
        body = chat_body(stream=True, max_tokens=9)
        if path == "/v1/completions":
            body = {"model": "tiny", "prompt": "x", "stream": True}
        elif path == "/v1/responses":
            body = {"model": "tiny", "input": "x", "stream": True}
        async with world.http.post(url + path, json=body, headers={"x-kvloom-resume": resume}) as response:
            assert response.status == 200
            assert response.headers["x-kvloom-response-id"]
            assert proxy.seen.endswith(b"\r\n\r\n")  # a head and nothing else
            request = await world.link.next_request()
            request.start()
            request.tokens("Hello")
            request.finish()
            assert "Hello" in await response.text()
        assert proxy.num_cut == 0


async def test_an_error_after_the_head_is_an_event_of_the_api() -> None:
    """A stream that has begun ends with the error event of its API, and the connection stays usable."""
    async with slow_world(0, FAST) as world:
        body = chat_body(stream=True, max_tokens=9)
        for path, event in (("/v1/chat/completions", "data: {"), ("/v1/messages", "event: error\n")):
            async with world.http.post(world.url + path, json=body) as response:
                assert response.status == 200
                (await world.link.next_request()).fail(ErrorReason.ERROR_REASON_QUEUE_FULL)
                text = await response.text()
            assert text.startswith(event)
            assert "overloaded" in text or "rate_limit" in text or "queue" in text.lower()


async def test_a_head_that_was_asked_to_explain_waits() -> None:
    """The caller wants the shard's name in it."""
    async with slow_world(0, FAST) as world:
        headers = {"x-kvloom-explain": "1"}
        posted = world.http.post(f"{world.url}/v1/chat/completions", json=chat_body(stream=True), headers=headers)
        task: asyncio.Task[Any] = asyncio.create_task(posted.__aenter__())
        request = await world.link.next_request()
        async with world.http.post(f"{world.url}/v1/chat/completions", json=chat_body(stream=True)) as later:
            assert later.status == 200
        assert not task.done()
        request.start()
        request.finish()
        assert (await task).headers["x-kvloom-shard"]


async def test_a_degraded_answer_says_so_after_its_head() -> None:
    """Answers are degraded when first tokens are slow, and then there is no header for it any more."""
    async with slow_world(0, FAST) as world:
        async with world.http.post(f"{world.url}/v1/chat/completions", json=chat_body(stream=True)) as response:
            request = await world.link.next_request()
            request.start(brownout="2; max_tokens=512")
            request.finish()
            chunks = [
                json.loads(line[6:]) for line in (await response.text()).split("\n") if line.startswith("data: {")
            ]
        assert "x-kvloom-brownout" not in response.headers
        assert chunks[-1]["kvloom"] == {"brownout": "2; max_tokens=512"}
