"""An OpenAI-compatible engine that costs as little as possible, for the gateways that are compared with ours. It reads
an Order from stdin and prints its port. Tokens come at the workload's pace and carry the same stamps as our simulated
engine's.

Besides chat completions it answers the requests that gateways make to their workers: health, models, server info,
tokenize.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import uvloop

from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.sim_tokens import stamp_of, stamp_token_ids

_LENGTH: Final = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_SSE: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


class WorkerOrder(msgspec.Struct):
    model: str
    model_path: str
    step_ms: float
    """0: tokens as fast as they can be written."""
    decode_every: int


class Worker:
    """The streams in progress, and the clock that they share."""

    def __init__(self, order: WorkerOrder) -> None:
        self.order = order
        self.words = _words(Path(order.model_path))
        self.streams: set[WorkerStream] = set()
        self._step = 0
        self._is_ticking = False
        self._loop = asyncio.get_running_loop()
        self._next_at = 0.0

    @property
    def step(self) -> int:
        return self._step

    def add(self, stream: WorkerStream) -> None:
        self.streams.add(stream)
        if not self._is_ticking:
            self._is_ticking = True
            self._next_at = self._loop.time()
            self._plan_tick()

    def _plan_tick(self) -> None:
        if self.order.step_ms:
            self._next_at = max(self._next_at + self.order.step_ms / 1e3, self._loop.time())
            self._loop.call_at(self._next_at, self._tick)
        else:
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._step += 1
        for stream in list(self.streams):
            if stream.next_step <= self._step:
                stream.emit()
        if self.streams:
            self._plan_tick()
        else:
            self._is_ticking = False


class WorkerStream:
    """One answer."""

    def __init__(self, worker: Worker, transport: asyncio.Transport, num_tokens: int, asked_at: float) -> None:
        self._worker = worker
        self._transport = transport
        self._num_left = num_tokens
        self._asked_at = asked_at
        self._is_first = True
        self.next_step = worker.step + 1
        model = json.dumps(worker.order.model)
        self._head = (
            f'{{"id":"chatcmpl-{id(self):x}","object":"chat.completion.chunk","created":1,"model":{model},'
            '"choices":[{"index":0,"delta":'
        ).encode()

    def emit(self) -> None:
        if self._transport.is_closing():
            self._worker.streams.discard(self)
            return
        now = time.monotonic()
        word = self._worker.words[stamp_of(now - self._asked_at if self._is_first else now)]
        if self._is_first:
            self._is_first = False
            self._transport.write(_SSE)
        self._num_left -= 1
        self._chunk(b'%b{"content":"%b"},"finish_reason":null}]}' % (self._head, word))
        self.next_step = self._worker.step + self._worker.order.decode_every
        if not self._num_left:
            self._worker.streams.discard(self)
            self._chunk(b'%b{},"finish_reason":"length"}]}' % self._head)
            self._chunk(b"[DONE]")
            self._transport.write(b"0\r\n\r\n")

    def _chunk(self, payload: bytes) -> None:
        self._transport.write(b"%x\r\ndata: %b\n\n\r\n" % (len(payload) + 8, payload))


class WorkerConnection(asyncio.Protocol):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._transport: asyncio.Transport
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while True:
            head, separator, rest = self._received.partition(b"\r\n\r\n")
            if not separator:
                return
            if b"chunked" in head.lower():
                end = rest.find(b"0\r\n\r\n")
                if end < 0:
                    return
                body, self._received = _dechunked(rest[:end]), rest[end + 5 :]
            else:
                length = _LENGTH.search(head)
                size = int(length[1]) if length else 0
                if len(rest) < size:
                    return
                body, self._received = rest[:size], rest[size:]
            method, target, _ = head.split(b" ", 2)
            self._answer(method, target.partition(b"?")[0].decode(), body)

    def _answer(self, method: bytes, path: str, body: bytes) -> None:
        if path.endswith("/chat/completions") and method == b"POST":
            asked = msgspec.json.decode(body)
            num_tokens = asked.get("max_tokens") or asked.get("max_completion_tokens") or 16
            if asked.get("stream"):
                self._worker.add(WorkerStream(self._worker, self._transport, num_tokens, time.monotonic()))
            else:
                self._send_json(_whole_answer(self._worker.order.model))
            return
        self._send_json(_known(path, self._worker.order.model, body))

    def _send_json(self, value: Any) -> None:
        payload = json.dumps(value).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(payload)
        self._transport.write(head + payload)


def _known(path: str, model: str, body: bytes) -> Any:
    if path == "/v1/models":
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 1, "owned_by": "mock"}]}
    if path in ("/get_model_info", "/model_info", "/get_server_info", "/server_info"):
        return {
            "model_path": model, "model_id": model, "served_model_name": model, "tokenizer_path": model,
            "is_generation": True, "model_type": "llama", "architectures": ["LlamaForCausalLM"],
            "tp_size": 1, "dp_size": 1, "pp_size": 1, "version": "0.5.9", "disaggregation_mode": "null",
            "max_total_num_tokens": 1 << 20, "max_running_requests": 4096, "context_length": 131_072,
            "internal_states": [{}],
        }  # fmt: skip
    if path == "/tokenize":  # four bytes per token: the cost is the worker's
        ids = list(body[::4])
        return {"count": len(ids), "max_model_len": 131_072, "tokens": ids}
    if path in ("/get_load", "/v1/loads", "/load"):
        return [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
    return {"version": "0.31.0"} if path == "/version" else {}


def _whole_answer(model: str) -> Any:
    message = {"role": "assistant", "content": " word"}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model, "choices": [choice],
            "usage": usage}  # fmt: skip


def _dechunked(framed: bytes) -> bytes:
    found, position = b"", 0
    while position < len(framed):
        line_end = framed.index(b"\r\n", position)
        size = int(framed[position:line_end], 16)
        found += framed[line_end + 2 : line_end + 2 + size]
        position = line_end + 4 + size
    return found


def _words(model_path: Path) -> list[bytes]:
    """The words by stamp, each with a leading space."""
    tokenizer = ModelTokenizer.load(model_path)
    try:
        texts = tokenizer.token_texts
        return [(texts[token_id] or "").encode() for token_id in stamp_token_ids(texts)]
    finally:
        tokenizer.close()


async def _serve(order: WorkerOrder) -> None:
    worker = Worker(order)
    server = await asyncio.get_running_loop().create_server(
        lambda: WorkerConnection(worker), "127.0.0.1", 0, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerOrder)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(order))


if __name__ == "__main__":
    main()
