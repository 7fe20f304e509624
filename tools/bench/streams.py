"""Streams as their clients see them: the requests of benches, sent over HTTP."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
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
    api_key: str = ""
    finish_reason: str = ""
    error: str = ""
    error_code: str = ""
    """The code of a refusal, as the API names it. "" if there was none."""
    sent_at: float = 0.0
    """In seconds since the epoch."""
    pieces_at: list[float] = []
    """When each piece of text came, in seconds since the epoch."""
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


async def play_one(session: aiohttp.ClientSession, model: str, stream: MeasuredStream) -> None:
    """Send a request and note what comes of it. What goes wrong is the stream's `error`."""
    body = {
        "model": model,
        "prompt": stream.prompt,
        "max_tokens": stream.max_tokens,
        "ignore_eos": True,
        "temperature": 0.9,
        "seed": stream.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"x-request-id": stream.name}
    if stream.api_key:
        headers["authorization"] = f"Bearer {stream.api_key}"
    stream.sent_at = time.time()
    try:
        async with session.post("/v1/completions", json=body, headers=headers) as response:
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
        stream.pieces_at.append(time.time())
        stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
    if usage := chunk.get("usage"):
        stream.num_prompt_tokens, stream.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
