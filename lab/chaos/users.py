"""Simulated users: each sends one request after another and checks the answers."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvloom_common.text.tokenizer import ModelTokenizer
from lab.chaos.checking.record import Record
from lab.chaos.checking.stored import StoredResponse
from lab.chaos.checking.verdicts import judge
from lab.chaos.clients.http_client import PATHS, HttpClient
from lab.chaos.clients.oracle import Oracle, prompt_ids_of
from lab.chaos.clients.questions import Behaviour, Endpoint, Question, UserCall, draw_call, draw_question, draw_response
from lab.chaos.clients.sdk_client import SdkClient
from lab.chaos.clients.transcript import AnswerEnd, Transcript, cut_short
from lab.chaos.tenants.operator import is_set_within
from lab.chaos.tenants.population import ChaosTenant
from lab.chaos.tenants.trespass import OpenAnswer

PATIENCE_SECONDS: Final = 60.0
"""An answer that has not ended by then is lost."""
_THINK_SECONDS: Final = 0.2
_WITHOUT_BUDGET_SECONDS: Final = 2.0
"""How long a user waits whose budget is used up."""
_STORED_SHARE: Final = 0.4


@dataclasses.dataclass(frozen=True, slots=True)
class QuestionSource:
    """Where users take their questions from."""

    pool: Sequence[Question] = ()
    """The only questions. If it is empty, questions are drawn freely."""
    stop_words: Sequence[str] = ()
    max_tokens: tuple[int, int] = (8, 90)
    models: Sequence[str] = ("",)
    has_stored: bool = False
    """True when some are for stored responses."""

    def limited_to(self, num_questions: int, rng: random.Random) -> QuestionSource:
        """The same, but with a fixed pool of so many questions."""
        pool = [self._draw_question(rng) for _ in range(num_questions)]
        return dataclasses.replace(self, pool=pool)

    def draw(self, rng: random.Random, last: Question | None = None) -> UserCall:
        """`last`: a question that would follow on the user's last stored response."""
        if self.has_stored and rng.random() < _STORED_SHARE:
            return draw_response(rng, self._draw_question(rng), last)
        return draw_call(rng, rng.choice(self.pool) if self.pool else self._draw_question(rng))

    def _draw_question(self, rng: random.Random) -> Question:
        return draw_question(rng, self.stop_words, self.max_tokens, self.models)


@dataclasses.dataclass(frozen=True, slots=True)
class UserContext:
    """The things that all users share."""

    http: HttpClient
    sdks: Sequence[SdkClient]
    """One for each tenant, or one for all users."""
    oracle: Oracle
    tokenizer: ModelTokenizer
    questions: QuestionSource
    on_record: Callable[[Record], None]
    tenants: Sequence[ChaosTenant] = ()
    """Users are theirs in turn. Empty: all users are callers without a tenant."""
    open_answers: dict[str, OpenAnswer] = dataclasses.field(default_factory=dict)
    """The open answers of tenants, by the names of their requests."""
    stored: list[StoredResponse] = dataclasses.field(default_factory=list)
    """The responses that may have been stored."""


async def run_user(context: UserContext, seed: int, number: int, stop: asyncio.Event) -> None:
    """Send requests until `stop` is set, and wait for the last answer."""
    rng = random.Random(f"user {number} of {seed}")
    num_asked = 0
    last: Question | None = None
    while not stop.is_set():
        num_asked += 1
        call = context.questions.draw(rng, last)
        # Every call has its own random numbers, so that the number of retries does not change the next call.
        record = await ask(context, call, random.Random(rng.getrandbits(64)), number, f"u{number}-{seed}-{num_asked}")
        context.on_record(record)
        if call.endpoint is Endpoint.RESPONSE and record.transcript.request_ids:
            last = await _note_stored(context, call, record.transcript, f"u{number}") or last
        has_no_budget = record.transcript.code == "insufficient_quota"
        await is_set_within(stop, _WITHOUT_BUDGET_SECONDS if has_no_budget else rng.random() * _THINK_SECONDS)


async def _note_stored(context: UserContext, call: UserCall, transcript: Transcript, user: str) -> Question | None:
    """Returns a question that would follow on the response, if that is stored for certain."""
    question, response_id = call.question, transcript.request_ids[-1]
    expected = await context.oracle.expected(question)
    is_background = call.behaviour in (Behaviour.RESUMABLE, Behaviour.FLAKY)
    context.stored.append(StoredResponse(response_id, user, expected, transcript.end, is_background))
    if transcript.end is not AnswerEnd.COMPLETE:
        return None
    turns = (*question.earlier, (question.prompt, expected.choices[0].text))
    return dataclasses.replace(question, previous_response_id=response_id, earlier=turns)


async def ask(context: UserContext, call: UserCall, rng: random.Random, number: int, name: str) -> Record:
    """Send a call of the user with that number, under a name that no other call has, and judge the answer."""
    question = call.question
    tenant = context.tenants[number % len(context.tenants)] if context.tenants else None
    expected = await context.oracle.expected(question)
    prompt_ids = await prompt_ids_of(question, context.tokenizer)
    is_sdk = call.endpoint in (Endpoint.SDK_TEXT, Endpoint.SDK_TOKENS)
    transcript = Transcript.begin(question.n, time.monotonic(), with_token_ids=is_sdk)
    if tenant is not None:
        transcript.refusal_codes = tenant.refusal_codes
        if not is_sdk:
            context.open_answers[name] = OpenAnswer(tenant.id, PATHS[call.endpoint], transcript.request_ids)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            if is_sdk:
                sdk = context.sdks[number % len(context.sdks)]
                await sdk.ask(call, prompt_ids, transcript, rng, name)
            else:
                key = None if tenant is None else lambda: tenant.current_key.secret
                await context.http.ask(call, prompt_ids, transcript, rng, name, key)
    except TimeoutError:
        if transcript.end not in (AnswerEnd.REFUSED, AnswerEnd.UNREACHABLE):
            transcript.log(f"gave up after event {transcript.num_events}")
            transcript.end = AnswerEnd.SILENT
    finally:
        context.open_answers.pop(name, None)
    transcript.ended_at = time.monotonic()
    if transcript.limited_by:
        expected = cut_short(expected, transcript)
    return Record.of(call, expected, transcript, judge(expected, transcript), "" if tenant is None else tenant.id)
