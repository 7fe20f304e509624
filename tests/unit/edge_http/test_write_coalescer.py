"""Bytes that belong together leave in one write, and first tokens leave before the rest of their engine step."""

from __future__ import annotations

import asyncio
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from edge_http.wire.sse import EventStream, WriteCoalescer

LIMIT = 1 << 20


class Socket:
    """Records which stream wrote what, in order."""

    def __init__(self, name: str, writes: list[tuple[str, bytes]]) -> None:
        self._name = name
        self._writes = writes

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self._writes.append((self._name, data))


class Connected:
    """The parts of a request that an EventStream uses."""

    version = aiohttp.HttpVersion11
    keep_alive = True

    def __init__(self, transport: Socket) -> None:
        self.transport = transport


@pytest.fixture
def writes() -> list[tuple[str, bytes]]:
    return []


def stream(name: str, write_coalescer: WriteCoalescer, writes: list[tuple[str, bytes]]) -> EventStream:
    return EventStream(cast(web.BaseRequest, Connected(Socket(name, writes))), LIMIT, write_coalescer)


def begin(events: EventStream) -> None:
    """Send the head and the first token, corked as an answer does it."""
    events.cork()
    events.begin({})
    events.send(b"", b"first", b"")


async def test_head_and_first_token_leave_in_one_write_before_other_streams_tokens(
    writes: list[tuple[str, bytes]],
) -> None:
    """The first tokens of a step come first; behind hundreds of other tokens they would be milliseconds late."""
    write_coalescer = WriteCoalescer()
    old, one, two = (stream(name, write_coalescer, writes) for name in ("old", "one", "two"))
    begin(old)
    await asyncio.sleep(0)
    assert [name for name, _ in writes] == ["old"]
    begin(one)
    begin(two)
    assert len(writes) == 1
    old.send(b"", b"next", b"")
    assert [name for name, _ in writes] == ["old", "one", "two", "old"]
    assert writes[1][1].startswith(b"HTTP/1.1 200 OK")
    assert b"first" in writes[1][1]
    await asyncio.sleep(0)
    assert len(writes) == 4


async def test_a_replay_flushes_the_corked_streams_too(writes: list[tuple[str, bytes]]) -> None:
    """Resumable answers replay the events that their readers missed."""
    write_coalescer = WriteCoalescer()
    old, new = stream("old", write_coalescer, writes), stream("new", write_coalescer, writes)
    old.begin({})
    begin(new)
    old.replay([b"hello"])
    assert [name for name, _ in writes] == ["old", "new", "old"]


@pytest.mark.parametrize("size", [1, 980, 1100])
@pytest.mark.parametrize("num_before", [None, 0, 4094])
async def test_an_event_has_the_same_bytes_however_it_is_sent(
    writes: list[tuple[str, bytes]], size: int, num_before: int | None
) -> None:
    """Numbered or not, live with its parts, live as text, and replayed: with numbers and sizes that were formatted in
    advance, and without."""
    text = "x" * size
    event = b'data: "%b"b' % text.encode()
    names = ("sent", "pushed") if num_before is None else ("sent", "replayed")
    for name in names:
        request = cast(web.BaseRequest, Connected(Socket(name, writes)))
        events = EventStream(request, LIMIT, WriteCoalescer(), last_event_number=num_before)
        for _ in range(3):
            if name == "sent":
                events.send(b"data: ", b'"%b"' % text.encode(), b"b")
            elif name == "pushed":
                push = events.fast_writer(b"data: ", b"b", lambda: None)
                assert push is not None
                push(text)
            else:
                events.replay([event])
        assert events.num_events == (num_before or 0) + 3
    expected = b""
    for number in range((num_before or 0) + 1, (num_before or 0) + 4):
        framed = (b"" if num_before is None else b"id: %d\n" % number) + event + b"\n\n"
        expected += b"%x\r\n%b\r\n" % (len(framed), framed)
    for name in names:
        assert b"".join(data for stream_name, data in writes if stream_name == name) == expected


async def test_a_whole_short_answer_leaves_in_one_write(writes: list[tuple[str, bytes]]) -> None:
    """Each write is a system call and wakes the client up; other corked streams do not tear the answer apart."""
    write_coalescer = WriteCoalescer()
    one, two = stream("one", write_coalescer, writes), stream("two", write_coalescer, writes)
    begin(one)
    begin(two)
    for events in (one, two):
        events.cork()
        events.send(b"", b"[DONE]", b"")
        events.end()
    assert not writes
    await asyncio.sleep(0)
    assert [name for name, _ in writes] == ["one", "two"]
    assert all(data.endswith(b"0\r\n\r\n") for _, data in writes)
