"""Users at work: each asks one thing after another and checks what it gets."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvloom.text.tokenizer import ModelTokenizer
from tools.chaos.checker import judge
from tools.chaos.clients.http_client import HttpClient
from tools.chaos.clients.oracle import Oracle, prompt_ids_of
from tools.chaos.clients.questions import Door, Errand, Question, draw_errand, draw_question
from tools.chaos.clients.sdk_client import SdkClient
from tools.chaos.clients.transcript import End, Transcript
from tools.chaos.record import Record

PATIENCE_SECONDS: Final = 60.0
"""Without an end by then an answer is lost."""
_THINK_SECONDS: Final = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class Curiosity:
    """What users may ask."""

    pool: Sequence[Question] = ()
    """Only these. Empty: anything."""
    stop_words: Sequence[str] = ()
    max_tokens: tuple[int, int] = (8, 90)

    def of_few(self, num_questions: int, rng: random.Random) -> Curiosity:
        """The same, but so many questions again and again."""
        pool = [draw_question(rng, self.stop_words, self.max_tokens) for _ in range(num_questions)]
        return dataclasses.replace(self, pool=pool)

    def draw(self, rng: random.Random) -> Errand:
        question = rng.choice(self.pool) if self.pool else draw_question(rng, self.stop_words, self.max_tokens)
        return draw_errand(rng, question)


@dataclasses.dataclass(frozen=True, slots=True)
class Desk:
    """What a user works with."""

    http: HttpClient
    sdk: SdkClient
    oracle: Oracle
    tokenizer: ModelTokenizer
    curiosity: Curiosity
    on_record: Callable[[Record], None]


async def run_user(desk: Desk, seed: int, number: int, stop: asyncio.Event) -> None:
    """Ask until `stop` is set; what was asked by then is waited for."""
    rng = random.Random(f"user {number} of {seed}")
    num_asked = 0
    while not stop.is_set():
        num_asked += 1
        errand = desk.curiosity.draw(rng)
        # Its own stream of random numbers: how often an answer has to be tried again must not change the next one.
        desk.on_record(await _ask(desk, errand, random.Random(rng.getrandbits(64)), f"u{number}-{seed}-{num_asked}"))
        try:
            async with asyncio.timeout(rng.random() * _THINK_SECONDS):
                await stop.wait()
        except TimeoutError:
            continue


async def _ask(desk: Desk, errand: Errand, rng: random.Random, name: str) -> Record:
    question = errand.question
    expected = await desk.oracle.expected(question)
    prompt_ids = await prompt_ids_of(question, desk.tokenizer)
    is_sdk = errand.door in (Door.SDK_TEXT, Door.SDK_TOKENS)
    seen = Transcript.begin(question.n, time.monotonic(), with_token_ids=is_sdk)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await (desk.sdk if is_sdk else desk.http).ask(errand, prompt_ids, seen, rng, name)
    except TimeoutError:
        if seen.end not in (End.REFUSED, End.UNREACHABLE):
            seen.tell(f"gave up behind event {seen.num_events}")
            seen.end = End.SILENT
    seen.ended_at = time.monotonic()
    return Record.of(errand, expected, seen, judge(expected, seen))
