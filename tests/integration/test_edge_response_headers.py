"""Every response names its request, and says how long it took, so that a report of a fault can be found in the logs."""

from __future__ import annotations

import asyncio

import pytest

from edge_http.admission import EdgeSettings
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import FakeRouterLink, answer


def scripted(*texts: str) -> FakeRouterLink:
    link = FakeRouterLink()
    link.script = answer(*texts)
    return link


async def raw(world: EdgeWorld, data: bytes) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """(status line, headers, body) of the first response to these bytes; the connection must end."""
    reader, writer = await asyncio.open_connection(*world.address)
    writer.write(data)
    async with asyncio.timeout(10):
        received = await reader.read()
    writer.close()
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return status, {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}, body


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("HEAD", "/health"),
        ("GET", "/v1/nowhere"),
        ("OPTIONS", "/v1/models"),
        ("POST", "/v1/models"),
        ("GET", "/"),
        ("POST", "/v1/audio/speech"),
    ],
)
async def test_every_path_and_method(method: str, path: str) -> None:
    """Clients log the id of whatever they get, also of refusals."""
    async with (
        edge_world() as world,
        world.http.request(method, world.url + path, headers={"x-request-id": "mine-1"}) as response,
    ):
        assert response.headers.getall("x-request-id") == ["mine-1"]
        assert int(response.headers["openai-processing-ms"]) >= 0


@pytest.mark.parametrize("resume", ["on", "off"])
async def test_streams(resume: str) -> None:
    """A stream's head says how long the client waited for it; a stream that is resumed has the id of the request that
    resumes it."""
    async with edge_world(link=scripted("a", "b")) as world:
        headers = {"x-request-id": "first", "x-kvloom-resume": resume}
        url = f"{world.url}/v1/chat/completions"
        async with world.http.post(url, json=chat_body(stream=True), headers=headers) as response:
            await response.read()
        assert response.headers.getall("x-request-id") == ["first"]
        assert int(response.headers["openai-processing-ms"]) >= 0
        if resume == "on":
            url += f"/{response.headers['x-kvloom-response-id']}?stream=true&starting_after=1"
            async with world.http.get(url, headers={"x-request-id": "second"}) as response:
                await response.read()
            assert response.headers.getall("x-request-id") == ["second"]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nlong: " + b"x" * 5000 + b"\r\n\r\n", 413),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nlong: " + b"x" * 50_000, 413),
        (b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 413),
        (
            b"GET /health HTTP/1.1\r\nHost: x\r\n"
            + b"".join(b"h%d: %b\r\n" % (i, b"y" * 900) for i in range(9))
            + b"\r\n",
            413,
        ),
    ],
    ids=["malformed", "long-header", "endless-header", "long-line", "many-headers"],
)
async def test_connections_that_are_refused(data: bytes, status: int) -> None:
    """Also what fails before there is a request has an id; headers that are too long are refused in words, with their
    limit."""
    async with edge_world(EdgeSettings(max_header_bytes=4096)) as world:
        line, headers, body = await raw(world, data)
        assert int(line.split()[1]) == status
        assert headers[b"x-request-id"].startswith(b"req-")
        if status == 413:
            assert b"4096" in body


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0(stream: bool) -> None:
    """Old clients and probes get an answer that ends with its connection, without chunks."""
    async with edge_world(link=scripted("hello")) as world:
        body = b'{"model": "tiny", "messages": [{"role": "user", "content": "the fox"}], "stream": %b}' % (
            b"true" if stream else b"false"
        )
        head = b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        line, headers, received = await raw(world, head % len(body) + body)
        assert line.split()[1] == b"200"
        assert b"transfer-encoding" not in headers
        assert b"hello" in received
        assert headers[b"x-request-id"].startswith(b"req-")
