"""Streams as their clients see them: the requests of benches, sent over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec

_STREAM_TIMEOUT_SECONDS: Final = 600.0


class MeasuredStream(msgspec.Struct):
    """One request, and its answer as its client saw it."""

    name: str
    """Its `x-request-id`."""
    max_tokens: int
    prompt: str = ""
    seed: int = 0
    priority_class: str = ""
    api_key: str = ""
    is_batch: bool = False
    """True for a request of the batch tier."""
    text: str = ""
    finish_reason: str = ""
    error: str = ""
    error_code: str = ""
    """The code of a refusal, as the API names it. "" if there was none."""
    status: int = 0
    """The HTTP status of the response, 0 if there was none."""
    brownout: str = ""
    """Its `x-kvloom-brownout`: the step and its effects."""
    sent_at: float = 0.0
    """In seconds since the epoch."""
    pieces_at: list[float] = []
    """When each piece of text came, in seconds since the epoch."""
    num_preemptions: int = 0
    """The number of preemptions, as the last event of the answer says."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """Both as its usage says, 0 if it had none: it failed, or its client left."""

    @property
    def longest_pause_seconds(self) -> float:
        gaps = [later - earlier for earlier, later in zip(self.pieces_at, self.pieces_at[1:], strict=False)]
        return max(gaps, default=0.0)

    @property
    def ttft_seconds(self) -> float | None:
        """None if no text came."""
        return self.pieces_at[0] - self.sent_at if self.pieces_at else None

    @property
    def has_finished(self) -> bool:
        return bool(self.finish_reason) and not self.error


def numbered_prompt(number: int, num_words: int, title: str = "Story") -> str:
    return f"{title} {number}. {' '.join(f'{number * 7 + word}' for word in range(num_words))}"


def open_session(url: str) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=_STREAM_TIMEOUT_SECONDS)
    return aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def play(session: aiohttp.ClientSession, model: str, streams: Sequence[MeasuredStream]) -> None:
    """All at the same time. What goes wrong with a stream is its `error`."""
    async with asyncio.TaskGroup() as tasks:
        for stream in streams:
            tasks.create_task(play_one(session, model, stream), name=stream.name)


async def play_one(session: aiohttp.ClientSession, model: str, stream: MeasuredStream) -> None:
    body = {
        "model": model,
        "prompt": stream.prompt,
        "max_tokens": stream.max_tokens,
        "ignore_eos": True,
        "temperature": 0.9,
        "seed": stream.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "service_tier": "flex" if stream.is_batch else "default",
    }
    headers = {"x-request-id": stream.name, "x-kvloom-details": "true"}
    if stream.priority_class:
        headers["x-kvloom-priority-class"] = stream.priority_class
    if stream.api_key:
        headers["authorization"] = f"Bearer {stream.api_key}"
    stream.sent_at = time.time()
    try:
        async with session.post("/v1/completions", json=body, headers=headers) as response:
            stream.status = response.status
            stream.brownout = response.headers.get("x-kvloom-brownout", "")
            if response.status != 200:
                _take_refusal(stream, await response.text())
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _take(stream, json.loads(line[6:]))
    except (aiohttp.ClientError, TimeoutError) as error:
        stream.error = repr(error)
    if not stream.finish_reason and not stream.error:
        stream.error = "the stream ended without a finish"


def _take_refusal(stream: MeasuredStream, text: str) -> None:
    stream.error = text[:200]
    with contextlib.suppress(ValueError, LookupError, TypeError):  # of something before the edge
        stream.error_code = json.loads(text)["error"]["code"] or ""


def _take(stream: MeasuredStream, chunk: Mapping[str, Any]) -> None:
    if "error" in chunk:
        stream.error = str(chunk["error"])
        return
    for choice in chunk["choices"]:
        stream.text += choice.get("text") or ""
        stream.pieces_at.append(time.time())
        stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
    if usage := chunk.get("usage"):
        stream.num_prompt_tokens, stream.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    stream.num_preemptions = chunk.get("kvloom", {}).get("moves", {}).get("preempted", stream.num_preemptions)
