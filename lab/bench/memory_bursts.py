"""Sends for `kvloom-lab bench memory` the bursts that once made a process grow, or hold up its event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

import aiohttp
import grpc

from kvloom.v1.router_service_pb2 import GenerateRequest

_TIMEOUT_SECONDS: Final = 300.0
_GZIP_MESSAGES: Final = 16
_GZIP_BYTES: Final = 16 * 2**20
_NUM_MESSAGES: Final = 20
_NUM_BODIES: Final = 60
_BODY_BYTES: Final = 4 * 2**20
_GRPC_BYTES: Final = 15 * 2**20
_ANSWERS: Final = 2
_ANSWER_TOKENS: Final = 1300
"""n=16 with 20 alternatives each: about 30 MB."""

Burst = Callable[[str, str, str], Awaitable[None]]
"""Takes the edge's URL, the router's address and the model's name."""


async def compressed_messages(_url: str, router_address: str, _model: str) -> None:
    """16 kB each, which would become 16 MiB."""
    message = b"\x0a" + bytes(_GZIP_BYTES)
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(router_address, options, grpc.Compression.Gzip) as channel:
        method = channel.unary_unary("/kvloom.v1.RouterService/Cancel")
        calls = [method(message, timeout=_TIMEOUT_SECONDS) for _ in range(_GZIP_MESSAGES)]
        await asyncio.gather(*calls, return_exceptions=True)


async def large_messages(_url: str, router_address: str, model: str) -> None:
    """Requests of 15 MiB, which are refused once their size is known."""
    message = GenerateRequest(model=model, text="the fox " * (_GRPC_BYTES // 8)).SerializeToString()
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(router_address, options) as channel:
        method = channel.unary_unary("/kvloom.v1.RouterService/Generate")
        calls = [method(message, timeout=_TIMEOUT_SECONDS) for _ in range(_NUM_MESSAGES)]
        await asyncio.gather(*calls, return_exceptions=True)


async def large_bodies(url: str, _router_address: str, model: str) -> None:
    """Bodies of 4 MiB, all at once."""
    body = _chat(model, content="the fox " * (_BODY_BYTES // 8 - 64))
    await _post(url, [body] * _NUM_BODIES)


async def large_answers(url: str, _router_address: str, model: str) -> None:
    """Answers of 30 MB that are not streamed."""
    body = _chat(model, n=16, max_tokens=_ANSWER_TOKENS, logprobs=True, top_logprobs=20, ignore_eos=True)
    await _post(url, [body] * _ANSWERS)


BURSTS: Final[dict[str, Burst]] = {
    f"{_GZIP_MESSAGES} compressed gRPC messages of 16 MiB": compressed_messages,
    f"{_NUM_MESSAGES} gRPC requests of 15 MiB": large_messages,
    f"{_NUM_BODIES} bodies of 4 MiB": large_bodies,
    f"{_ANSWERS} answers of 30 MB (n=16, top_logprobs=20)": large_answers,
}


def _chat(model: str, content: str = "the fox", **fields: Any) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}], **fields}).encode()


async def _post(url: str, bodies: list[bytes]) -> None:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=len(bodies))
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(_post_one(session, url, body) for body in bodies), return_exceptions=True)


async def _post_one(session: aiohttp.ClientSession, url: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
        async for _ in response.content.iter_chunked(2**18):
            pass  # as fast as it comes
