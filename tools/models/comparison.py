"""Measures the likelihood gap of two served models: the one answers, the other one scores the answers, and for the cost
of that it also answers itself, and scores again with the prompts in its prefix cache. The phases run one after another,
so that the CPU time of each is known."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from kvloom.client.client import Client
from kvloom.client.generate_request import GenerateOptions
from kvloom.transport.channel_options import OpenChannel
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, SequenceStart, TokenLogprobs
from kvloom_common.models.card_service import fetch_card
from kvloom_common.models.likelihood_gap import (
    MIN_ANSWERS,
    GapInterval,
    GapSums,
    gap_interval,
    lower_bound_at_any_time,
    num_answers_until,
)
from kvloom_common.models.model_card import ModelCardError
from kvloom_common.models.served_model import ServedModel, served_model_of
from kvloom_common.text.tokenizer import ChatMessage
from tools.failures import CommandError

T = TypeVar("T")

_FORMS: Final = (
    "Explain in a few sentences how {} works.",
    "Write a short letter to a friend about {}.",
    "What should a beginner know about {}?",
    "Tell a story of five sentences in which {} is important.",
    "List three advantages and three disadvantages of {}.",
    "Who invented {}, and why?",
    "Translate into French: I have been reading about {} all day.",
    "Write a Python function that has something to do with {}.",
    "Compare {} with something similar.",
    "Ask me three questions about {}.",
)
_TOPICS: Final = (
    *("a bicycle", "the tides", "sourdough bread", "a loom", "a lighthouse", "photosynthesis", "chess", "an airport"),
    *("the printing press", "a violin", "rain", "the Roman army", "compound interest", "honey bees", "a glacier"),
    *("the stock market", "a vaccine", "jazz", "a suspension bridge", "the number zero"),
)
TIMEOUT_SECONDS: Final = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """Says what is measured."""

    model: str
    candidate: str
    num_requests: int = 60
    max_tokens: int = 64
    temperature: float = 1.0
    concurrency: int = 4
    threshold: float = 0.05
    """In nats per token."""


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """A prompt and an answer to it."""

    prompt: Sequence[int]
    token_ids: Sequence[int]
    surprisal: float
    """Under the model that answered, in nats."""


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerScore:
    """The candidate's judgement of an answer."""

    surprisal: float
    num_cached_tokens: int
    """The number of the prompt's tokens that were cached."""


@dataclasses.dataclass(frozen=True, slots=True)
class CpuSeconds:
    """The CPU seconds of the candidate's shards, for all answers. None: they cannot be seen from here."""

    scoring: float | None
    """Prompts included, but for the blocks that they have in common."""
    scoring_cached: float | None
    """With the prompts' KV in the prefix cache."""
    decoding_cached: float | None
    """With the prompts' KV in the prefix cache, for answering the same prompts itself."""

    @property
    def decoding(self) -> float | None:
        """The CPU seconds for decoding alone, computed like `scoring`: a prompt's KV costs the same there."""
        if self.scoring is None or self.scoring_cached is None or self.decoding_cached is None:
            return None
        return self.decoding_cached + self.scoring - self.scoring_cached


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    plan: ComparisonPlan
    sums: GapSums
    num_prompt_tokens: int
    num_cached_tokens: int
    """The number of these tokens that were in the prefix cache."""
    num_until_detection: int | None
    """How many answers it took until the bound at any time exceeded the threshold. None: it never did."""
    cpu: CpuSeconds

    @property
    def interval(self) -> GapInterval | None:
        return gap_interval(self.sums)

    @property
    def lower_bound(self) -> float:
        return lower_bound_at_any_time(self.sums)

    @property
    def verdict(self) -> str:
        if self.num_until_detection is not None:
            return "worse"
        return "as good" if self.interval is not None and self.interval.high <= self.plan.threshold else "undecided"


def questions(count: int) -> list[str]:
    """Different ones, always in the same order."""
    asked = [form.format(topic) for form, topic in itertools.product(_FORMS, _TOPICS)]
    random.Random(1).shuffle(asked)
    if count > len(asked):
        raise CommandError(f"there are {len(asked)} prompts, so --requests can be at most {len(asked)}")
    return asked[:count]


async def compare(
    client: Client,
    plan: ComparisonPlan,
    card_of: Callable[[str], Awaitable[ServedModel]],
    cpu_seconds: Callable[[str], float | None],
    on_progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """`cpu_seconds`: of the shards of a model, since they started. Raises CommandError, KvloomError."""
    asked = questions(plan.num_requests)
    model, candidate = await card_of(plan.model), await card_of(plan.candidate)
    try:
        if not model.has_tokens_of(candidate):
            raise CommandError(f"{plan.model} and {plan.candidate} have different tokenizers: they cannot be compared")
        prompts = [(await model.tokenizer.encode_chat([ChatMessage("user", text)]))[0].tolist() for text in asked]
    finally:
        model.tokenizer.close()
        candidate.tokenizer.close()

    async def phase(what: str, jobs: Sequence[Callable[[], Awaitable[T]]]) -> tuple[list[T], float | None]:
        on_progress(what)
        before = cpu_seconds(plan.candidate)
        done = await _at_most(plan.concurrency, jobs)
        after = cpu_seconds(plan.candidate)
        return done, None if before is None or after is None else after - before

    exchanges, _ = await phase(
        f"{plan.model} answers {len(prompts)} prompts",
        [partial(_answer, client, plan.model, prompt, seed, plan) for seed, prompt in enumerate(prompts)],
    )
    scores = [partial(_score, client, plan.candidate, exchange) for exchange in exchanges]
    scored, scoring = await phase(f"{plan.candidate} scores the answers of {plan.model}", scores)
    _, decoding = await phase(
        f"{plan.candidate} answers the prompts, too",
        [partial(_answer, client, plan.candidate, prompt, seed, plan) for seed, prompt in enumerate(prompts)],
    )
    again, scoring_cached = await phase(f"{plan.candidate} scores them again, with the prompts' KV cached", scores)
    gaps = [(len(one.token_ids), other.surprisal - one.surprisal) for one, other in zip(exchanges, scored, strict=True)]
    sums = GapSums()
    for num_tokens, gap in gaps:
        sums += GapSums.of(num_tokens, gap)
    until = num_answers_until(gaps, plan.threshold)
    num_tokens = sum(map(len, prompts)), sum(score.num_cached_tokens for score in again)
    return Comparison(plan, sums, *num_tokens, until, CpuSeconds(scoring, scoring_cached, decoding))


async def fetched_model(client: Client, open_channel: OpenChannel, address: str, name: str) -> ServedModel:
    """A model that is served, with its tokenizer. Raises CommandError, KvloomError."""
    served = {info.name: info for info in await client.list_models()}
    if name not in served:
        raise CommandError(f"no model {name!r} is served; there are: {', '.join(sorted(served))}")
    checksum = served[name].card_checksum
    try:
        async with open_channel(address) as channel:
            packed = await fetch_card(channel, name, checksum)
        return await asyncio.to_thread(served_model_of, packed, checksum)
    except (ModelCardError, OSError, ValueError) as error:
        raise CommandError(f"the tokenizer of {name} cannot be used: {error}") from error


async def _answer(client: Client, model: str, prompt: Sequence[int], seed: int, plan: ComparisonPlan) -> Exchange:
    answer = await client.complete(
        model=model,
        token_ids=prompt,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        seed=seed,
        logprobs=0,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    choice = answer.choices[0]
    if int(choice.finish_reason) not in (FINISH_REASON_STOP, FINISH_REASON_LENGTH):
        raise CommandError(f"an answer of {model} ended as {choice.finish_reason.name}")
    return Exchange(prompt, choice.token_ids, _surprisal(choice.logprobs))


async def _score(client: Client, candidate: str, exchange: Exchange) -> AnswerScore:
    options = GenerateOptions(
        model=candidate,
        token_ids=[*exchange.prompt, *exchange.token_ids],
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        prompt_logprobs_start=len(exchange.prompt),
        tier="batch",
        timeout_seconds=TIMEOUT_SECONDS,
    )
    start = SequenceStart()
    async with client.generate(**options) as deltas:
        async for delta in deltas:
            start = delta.start or start
    return AnswerScore(_surprisal(start.prompt_logprobs), start.num_cached_tokens)


def _surprisal(entries: Sequence[TokenLogprobs]) -> float:
    return -sum(entry.logprob for entry in entries)


async def _at_most(count: int, jobs: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Run the jobs, so many at a time, and return their results in their order."""
    room = asyncio.Semaphore(count)

    async def limited(job: Callable[[], Awaitable[T]]) -> T:
        async with room:
            return await job()

    tasks = [asyncio.ensure_future(limited(job)) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def report(found: Comparison) -> dict[str, Any]:
    """For --json. Gaps in nats per token."""
    interval = found.interval
    return {
        "model": found.plan.model,
        "candidate": found.plan.candidate,
        "requests": int(found.sums.num_answers),
        "prompt_tokens": found.num_prompt_tokens,
        "answer_tokens": int(found.sums.tokens),
        "gap": found.sums.gap_per_token,
        "interval": None if interval is None else [interval.low, interval.high],
        "lower_bound_at_any_time": None if found.sums.num_answers < MIN_ANSWERS else found.lower_bound,
        "threshold": found.plan.threshold,
        "verdict": found.verdict,
        "requests_until_detection": found.num_until_detection,
        "cached_prompt_tokens": found.num_cached_tokens,
        "cpu_seconds": {
            "scoring": found.cpu.scoring,
            "decoding": found.cpu.decoding,
            "scoring_cached": found.cpu.scoring_cached,
            "decoding_cached": found.cpu.decoding_cached,
        },
    }


def lines(found: Comparison) -> list[str]:
    """For people."""
    interval, cpu, plan = found.interval, found.cpu, found.plan
    within = "too few answers for an interval"
    if interval is not None:
        within = f"95% interval {interval.low:+.5f} to {interval.high:+.5f}"
    shown = [
        f"{plan.model} against {plan.candidate}: {found.sums.num_answers:.0f} answers, {found.sums.tokens:.0f} tokens",
        f"likelihood gap: {found.sums.gap_per_token:+.5f} nats per token ({within})",
        f"verdict: {found.verdict} (threshold {plan.threshold:g})",
    ]
    if found.num_until_detection is not None:
        shown.append(f"found after {found.num_until_detection} answers")
    for seconds, other, where in (
        (cpu.scoring, cpu.decoding, ""),
        (cpu.scoring_cached, cpu.decoding_cached, ", with the prompts' KV cached"),
    ):
        if seconds is not None and other:
            share = f"{seconds / other:.0%}"
            shown.append(f"CPU of {plan.candidate}{where}: scoring {seconds:.1f} s, answering {other:.1f} s ({share})")
    return shown
