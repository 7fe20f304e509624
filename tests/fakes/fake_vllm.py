"""An engine of others as a gateway sees it: HTTP with streams and metrics, and KV events over ZeroMQ."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import web


class FakeVllm:
    """Answers every request with its name, and with as many events as the body's max_tokens; the test lets them go."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = ""
        self.num_waiting = 0
        self.kv_usage = 0.0
        self.num_requests = 0
        self.bodies: list[bytes] = []
        self.may_go_on = asyncio.Event()
        """Set: a stream sends its events without waiting after the first one."""
        self.may_go_on.set()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", int(self.address.rpartition(":")[2] or 0))
        await site.start()
        self.address = f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Its port refuses connections from now on."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            text=f"vllm:num_requests_running 0\nvllm:num_requests_waiting {self.num_waiting}\n"
            f"vllm:kv_cache_usage_perc {self.kv_usage}\n"
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1\n'
        )

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.num_requests += 1
        self.bodies.append(raw)
        body = msgspec.json.decode(raw) if raw else {}
        if not body.get("stream"):
            return web.json_response({"served_by": self.name})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(body.get("max_tokens", 3)):
            await response.write(f"data: {self.name} {number}\n\n".encode())
            await self.may_go_on.wait()
        return response


class FakeKvPublisher:
    """Publishes batches of KV events as vLLM does, and replays them."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.XPUB)
        self._replay = self._context.socket(zmq.ROUTER)
        for socket in (self._events, self._replay):
            socket.linger = 0
        self.events_address = "tcp://127.0.0.1:{}".format(self._events.bind_to_random_port("tcp://127.0.0.1"))
        self.replay_address = "tcp://127.0.0.1:{}".format(self._replay.bind_to_random_port("tcp://127.0.0.1"))
        self.batches: list[tuple[int, bytes]] = []
        self.num_replays = 0
        self._task = asyncio.create_task(self._serve_replays())

    async def until_subscribed(self) -> None:
        await self._events.recv()

    async def publish(self, *events: Any, at: float = 1.0, number: int | None = None, is_lost: bool = False) -> None:
        number = len(self.batches) if number is None else number
        payload = msgspec.msgpack.encode({"ts": at, "events": events})
        self.batches.append((number, payload))
        if not is_lost:
            await self._events.send_multipart([b"", number.to_bytes(8), payload])

    async def __aenter__(self) -> FakeKvPublisher:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._events.close()
        self._replay.close()
        self._context.term()

    async def _serve_replays(self) -> None:
        while True:
            client, _, begin = await self._replay.recv_multipart()
            self.num_replays += 1
            for number, payload in self.batches:
                if number >= int.from_bytes(begin):
                    await self._replay.send_multipart([client, b"", number.to_bytes(8), payload])
            await self._replay.send_multipart([client, b"", (-1).to_bytes(8, signed=True), b""])
