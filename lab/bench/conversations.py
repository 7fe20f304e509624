"""Plays conversations against a running fabric over HTTP, as a chat client would, and records every turn."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp

from tools.failures import CommandError

_TIMEOUT_SECONDS: Final = 600.0
_MESSAGE_WORDS: Final = 70
_TOPICS: Final = (
    "weaving",
    "bread",
    "tides",
    "bicycles",
    "maps",
    "bees",
    "bridges",
    "glass",
    "tea",
    "clocks",
    "wool",
    "ink",
)
_SENTENCES: Final = (
    "the old workshop keeps a careful record of every thread that passes over its wooden frame and in the evening "
    "someone writes down which colour was used how long the work took and what could be better next time while "
    "rain falls on the roof and the river turns the wheel below the window"
)
SYSTEM_PROMPT: Final = (
    "You are a patient assistant who explains crafts, nature and machines to curious people. Answer in plain words, in "
    "two or three short sentences, and never in lists. Say so when you do not know something. Take into account what "
    "was said before in this conversation, and do not repeat it unless you are asked to. If a question has several "
    "parts, answer the most important one first. Use examples from everyday life where they help, give figures only "
    "when you are sure of them, and explain every word that a child of twelve would not know. Do not greet, do not "
    "apologise, do not praise the question, and do not end with a question of your own. "
)


@dataclasses.dataclass(frozen=True, slots=True)
class ConversationTurn:
    """One turn of one conversation. Times are readings of the monotonic clock, in seconds."""

    conversation: int
    turn: int
    messages: list[dict[str, str]]
    """The whole conversation so far, as it was sent."""
    sent_at: float
    first_text_at: float
    ended_at: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    shard: str

    @property
    def ttft_seconds(self) -> float:
        return self.first_text_at - self.sent_at


def user_message(conversation: int, turn: int) -> str:
    """A message of about a hundred tokens: always the same for the same numbers, and different for all others."""
    rng = random.Random(f"{conversation}.{turn}")
    topic = _TOPICS[conversation % len(_TOPICS)]
    words = " ".join(rng.choices(_SENTENCES.split(), k=_MESSAGE_WORDS))
    return (
        f"Question {turn + 1} of visitor {conversation + 1}, about {topic}: {words}. What does this say about {topic}?"
    )


async def play(
    url: str, model: str, *, num_conversations: int, num_turns: int, max_tokens: int, think_seconds: float
) -> list[ConversationTurn]:
    """Play all conversations concurrently. Each one waits for an answer and then for up to `think_seconds`, which are
    random but the same in every run. Returns the exchanges in the order in which they were sent. Raises CommandError.
    """
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        tasks = [
            asyncio.create_task(_converse(session, url, model, i, num_turns, max_tokens, think_seconds))
            for i in range(num_conversations)
        ]
        try:
            played = await asyncio.gather(*tasks)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CommandError(f"the fabric did not answer: {error!r}") from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return sorted((exchange for exchanges in played for exchange in exchanges), key=lambda exchange: exchange.sent_at)


async def _converse(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    conversation: int,
    num_turns: int,
    max_tokens: int,
    think_seconds: float,
) -> list[ConversationTurn]:
    rng = random.Random(conversation)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}]
    exchanges: list[ConversationTurn] = []
    for turn in range(num_turns):
        if turn:
            await asyncio.sleep(think_seconds * rng.random())
        messages.append({"role": "user", "content": user_message(conversation, turn)})
        exchange, answer = await _ask(session, url, model, conversation, turn, list(messages), max_tokens)
        exchanges.append(exchange)
        messages.append({"role": "assistant", "content": answer})
    return exchanges


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    conversation: int,
    turn: int,
    messages: list[dict[str, str]],
    max_tokens: int,
) -> tuple[ConversationTurn, str]:
    body = {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_at = time.monotonic()
    first_text_at: float | None = None
    texts: list[str] = []
    usage: dict[str, Any] = {}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers={"x-kvloom-explain": "1"}) as answer:
        if answer.status != 200:
            raise CommandError(f"the fabric refused a request ({answer.status}): {await answer.text()}")
        async for chunk in _chunks(answer):
            if "error" in chunk:
                raise CommandError(f"the fabric failed a request: {chunk['error']}")
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    first_text_at = first_text_at or time.monotonic()
                    texts.append(text)
            usage = chunk.get("usage") or usage
        shard = answer.headers.get("x-kvloom-shard", "")
    ended_at = time.monotonic()
    if not usage:
        raise CommandError("the fabric broke an answer off")
    exchange = ConversationTurn(
        conversation=conversation,
        turn=turn,
        messages=messages,
        sent_at=sent_at,
        first_text_at=first_text_at or ended_at,
        ended_at=ended_at,
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        num_output_tokens=usage["completion_tokens"],
        shard=shard,
    )
    return exchange, "".join(texts)


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a stream of server-sent events."""
    async for line in answer.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])
