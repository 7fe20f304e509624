"""Every HTTP request leaves one line, whatever became of it, and every line of a request names it."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from structlog.testing import LogCapture

from edge_http.edge import Edge
from kvloom_common.config import LogConfig
from kvloom_common.process.access_log import AccessLog
from kvloom_common.process.request_context import add_request_fields
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.waiting import eventually

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADERS = {"x-request-id": "mine-1", "traceparent": TRACEPARENT, "Authorization": "Bearer sk-secret"}


def switch_on(edge: Edge, **settings: Any) -> None:
    edge.access_log = AccessLog(LogConfig(**settings))


async def lines_of(world: EdgeWorld, capture: LogCapture, num_lines: int) -> list[dict[str, Any]]:
    """The lines of the access log; a line may be written just after the client has its answer."""

    def written() -> list[dict[str, Any]]:
        return [dict(entry) for entry in capture.entries if entry["event"] == "http_request_ended"]

    await eventually(lambda: len(written()) >= num_lines, "the lines")
    return written()


BEFORE = structlog.get_config()


def capturing() -> LogCapture:
    capture = LogCapture()
    structlog.configure(processors=[add_request_fields, capture], cache_logger_on_first_use=False)
    return capture


async def test_an_answered_and_refused_requests_leave_a_line_each() -> None:
    """An operator must see what was refused, by whom it was sent and which answer it was, and no secret."""
    capture = capturing()
    try:
        async with edge_world() as world:
            switch_on(world.edge)
            await world.http.get(f"{world.url}/v1/models?api_key=query-secret", headers=HEADERS)
            await world.http.post(f"{world.url}/v1/chat/completions", json=chat_body(model="none"), headers=HEADERS)
            await world.http.get(f"{world.url}/nothing%1b[31m", headers=HEADERS)
            reader, writer = await asyncio.open_connection(*world.address)
            writer.write(b"nonsense\r\n\r\n")
            await reader.read()
            writer.close()
            lines = await lines_of(world, capture, 4)
        assert [line["status"] for line in lines] == [200, 404, 404, 400]
        for line in lines[:3]:
            assert line["client_request_id"] == "mine-1"
            assert line["traceparent"] == TRACEPARENT
            assert line["tenant"].startswith("key-")
            assert line["duration_seconds"] >= 0
        assert (lines[0]["method"], lines[0]["path"], lines[0]["route"]) == ("GET", "/v1/models", "/v1/models")
        assert lines[0]["num_response_bytes"] > 0
        assert lines[1]["error_type"] == "model_not_found"
        assert lines[1]["num_request_bytes"] > 0
        assert "secret" not in repr(capture.entries)
        assert "\x1b" not in repr(lines[2]["path"])
    finally:
        structlog.configure(**BEFORE)


async def test_a_client_that_leaves_is_logged_with_its_answer() -> None:
    """A request without an answer is the one that people ask about; its line names the response."""
    capture = capturing()
    try:
        async with edge_world() as world:
            switch_on(world.edge)
            asking = asyncio.create_task(
                world.http.post(f"{world.url}/v1/chat/completions", json=chat_body(), headers=HEADERS)
            )
            await eventually(lambda: world.link.requests, "the request")
            assert world.link.requests[0].request.submit.client_request_id == "mine-1", (
                "the router gets the caller's id"
            )
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            (line,) = await lines_of(world, capture, 1)
        assert line["status"] == 499
        assert line["request_id"].startswith("chatcmpl-")
        assert line["model"] == "tiny"
    finally:
        structlog.configure(**BEFORE)


async def test_nothing_is_logged_when_it_is_off() -> None:
    """Someone who switches it off pays nothing."""
    capture = capturing()
    try:
        async with edge_world() as world:
            switch_on(world.edge, access="off")
            await world.http.get(f"{world.url}/v1/models")
        assert [entry for entry in capture.entries if entry["event"] == "http_request_ended"] == []
    finally:
        structlog.configure(**BEFORE)


def test_all_processes_draw_the_same_sample() -> None:
    """A request whose line is in one process's log and not in another's cannot be followed."""
    first, second = (AccessLog(LogConfig(access_sample_share=0.3)) for _ in range(2))
    ids = [f"id-{i}" for i in range(1000)]
    chosen = [name for name in ids if first.wants(name)]
    assert chosen == [name for name in ids if second.wants(name)]
    assert 200 < len(chosen) < 400
