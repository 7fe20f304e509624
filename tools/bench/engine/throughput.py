"""Measures how fast a running engine prefills and decodes, in a bounded time per figure, whatever its speed."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import msgspec

from shard_server.engines.base import Engine, EngineError, EngineRequest, Sampling, SequenceEnd, StepOutput

DEFAULT_MAX_SECONDS: Final = 60.0
PREFILL_TOKENS: Final = 512
PREFILL_RUNS: Final = 5
DECODE_STEPS: Final = 48
_PROMPT_TOKENS: Final = (32, 256)
"""Shortest and longest prompt of a decoding batch; the others are spread evenly between them."""
_MIN_PROMPT_TOKENS: Final = 8
_PREFILL_SHARE: Final = 0.25
"""The share of a figure's time that the prompts of a batch may take. It is small because sequences that started first
decode in the same steps."""


class PrefillFigure(msgspec.Struct):
    """The speed of prompts that run alone, as a median. `note` is the reason why there is no figure, or a rough one."""

    prompt_tokens: int
    tokens_per_second: float | None = None
    num_runs: int = 0
    note: str | None = None


class DecodeFigure(msgspec.Struct):
    """The speed of steps in which every sequence of a batch gets a token, as a median. `note` is as above."""

    batch: int
    prompt_tokens: list[int] = msgspec.field(default_factory=list)
    step_ms: float | None = None
    tokens_per_second: float | None = None
    num_steps: int = 0
    context_tokens: list[int] = msgspec.field(default_factory=list)
    """By sequence: its tokens, prompt and answer, in the middle of the measurement."""
    note: str | None = None


class ThroughputBench:
    """Drives one engine with random prompts, no two of which begin alike, so that nothing is reused.

    Every method raises EngineError when the engine has died or does not end its sequences.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        temperature: float = 0.0,
        max_seconds: float = DEFAULT_MAX_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_seconds` bounds each figure, apart from the step in progress when the time is over."""
        self._engine = engine
        self._temperature = temperature
        self._max_seconds = max_seconds
        self._clock = clock
        self._steps: AsyncIterator[StepOutput] = engine.steps()
        self._random = random.Random(0)
        self._num_requests = 0
        self._live: set[str] = set()
        self._prefill_tokens_per_second = engine.info.prefill_tokens_per_second
        """0: unknown."""

    async def prefill(self) -> PrefillFigure:
        """Measure the time from submitting a prompt to its first token."""
        usual = min(PREFILL_TOKENS, self._engine.info.max_model_len - 1)
        num_tokens = max(min(usual, self._affordable_tokens(0.5)), 1)
        figure = PrefillFigure(num_tokens)
        deadline = self._clock() + self._max_seconds
        seconds: list[float] = []
        while len(seconds) < PREFILL_RUNS:
            begin = self._clock()
            if seconds and begin + seconds[-1] > deadline:
                break
            request_id = self._submit(num_tokens, max_tokens=1)
            if (failure := await self._wait_for_end(request_id, deadline)) is not None:
                figure.note = failure
                break
            seconds.append(self._clock() - begin)
        await self._end_all()
        if seconds:
            figure.tokens_per_second = self._prefill_tokens_per_second = num_tokens / statistics.median(seconds)
            figure.num_runs = len(seconds)
            runs = _shortfall("runs", len(seconds), PREFILL_RUNS)
            tokens = _shortfall("prompt tokens", num_tokens, usual)
            figure.note = _joined(figure.note, runs, tokens)
        return figure

    async def decode(self, batch: int) -> DecodeFigure:
        """Measure the time between two steps in each of which every sequence of the batch got a token.

        Answers have no end of their own: the sequences are cancelled once enough steps were measured. So they all
        decode together, however many steps it takes until the last of them is prefilled.
        """
        info = self._engine.info
        usual_lengths = [min(length, max(info.max_model_len // 2, 1)) for length in prompt_lengths(batch)]
        lengths = _shortened(usual_lengths, self._affordable_tokens(_PREFILL_SHARE))
        figure = DecodeFigure(batch, lengths)
        if batch > info.max_batch:
            figure.note = f"the engine runs {info.max_batch} sequences at a time"
            return figure
        if sum(length // info.block_size + 1 for length in lengths) > info.num_blocks:
            figure.note = f"{info.num_blocks} KV blocks are too few for {batch} sequences"
            return figure
        deadline = self._clock() + self._max_seconds
        contexts = {self._submit(length, max_tokens=info.max_model_len - length): length for length in lengths}
        intervals: list[float] = []
        previous_time: float | None = None
        most_together = 0
        while len(intervals) < DECODE_STEPS and self._clock() < deadline:
            output = await self._next(deadline)
            if output is None:
                break
            now = self._clock()
            for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
                contexts[request_id] += len(token_ids)
            most_together = max(most_together, len(output.token_ids))
            is_full = len(output.token_ids) == batch and not output.starts
            if is_full and previous_time is not None:
                intervals.append(now - previous_time)
            previous_time = now if is_full else None
            if output.ends:
                figure.note = _reason(output.ends[0])
                break
        await self._end_all()
        if not intervals:
            figure.note = figure.note or (
                f"no two steps with a token for each of the {batch} sequences within {self._max_seconds:g} s "
                f"(at most {most_together} decoded together)"
            )
            return figure
        step_seconds = statistics.median(intervals)
        figure.step_ms = step_seconds * 1e3
        figure.tokens_per_second = batch / step_seconds
        figure.num_steps = len(intervals)
        figure.context_tokens = [length - len(intervals) // 2 for length in contexts.values()]
        prompts = _shortfall("prompt tokens", sum(lengths), sum(usual_lengths))
        figure.note = _joined(figure.note, _shortfall("steps", len(intervals), DECODE_STEPS), prompts)
        return figure

    def _affordable_tokens(self, share: float) -> int:
        """The prompt tokens that take this share of a figure's time."""
        speed = self._prefill_tokens_per_second
        return int(speed * share * self._max_seconds) if speed else PREFILL_TOKENS * PREFILL_RUNS

    def _submit(self, num_tokens: int, *, max_tokens: int) -> str:
        self._num_requests += 1
        vocab_size = self._engine.info.vocab_size
        prompt = [self._random.randrange(vocab_size) for _ in range(num_tokens)]
        request_id = f"bench-{self._num_requests}"
        self._engine.submit(EngineRequest(request_id, prompt, Sampling(temperature=self._temperature), max_tokens))
        self._live.add(request_id)
        return request_id

    async def _next(self, deadline: float) -> StepOutput | None:
        """Return None when the time is over."""
        try:
            async with asyncio.timeout(max(deadline - self._clock(), 0.0)):
                output = await anext(self._steps)
        except TimeoutError:
            self._steps = self._engine.steps()  # cancelling a generator ends it
            return None
        except StopAsyncIteration:
            raise EngineError("the engine has stopped") from None
        self._live.difference_update(end.request_id for end in output.ends)
        return output

    async def _wait_for_end(self, request_id: str, deadline: float) -> str | None:
        """Return the reason if the sequence fails or does not end in time."""
        while True:
            output = await self._next(deadline)
            if output is None:
                return f"no prompt was prefilled within {self._max_seconds:g} s"
            for end in output.ends:
                if end.request_id == request_id:
                    return _reason(end) if end.error else None

    async def _end_all(self) -> None:
        for request_id in self._live:
            self._engine.cancel(request_id)
        deadline = self._clock() + self._max_seconds
        while self._live:
            if await self._next(deadline) is None:
                raise EngineError(f"the engine did not end its sequences within {self._max_seconds:g} s")


def prompt_lengths(batch: int) -> list[int]:
    shortest, longest = _PROMPT_TOKENS
    if batch == 1:
        return [(shortest + longest) // 2]
    return [shortest + (longest - shortest) * index // (batch - 1) for index in range(batch)]


def _shortened(lengths: Sequence[int], num_affordable: int) -> list[int]:
    factor = min(num_affordable / sum(lengths), 1.0)
    return [max(int(length * factor), min(length, _MIN_PROMPT_TOKENS)) for length in lengths]


def _shortfall(what: str, num: int, num_usual: int) -> str | None:
    return f"{num} {what} instead of {num_usual}" if num < num_usual else None


def _joined(failure: str | None, *shortfalls: str | None) -> str | None:
    parts = [part for part in shortfalls if part]
    if failure is None and parts:
        return f"{', '.join(parts)}: this machine is slow"
    return ", ".join([*([failure] if failure else []), *parts]) or None


def _reason(end: SequenceEnd) -> str:
    return f"a sequence failed: {end.error}" if end.error else f"a sequence ended early ({end.reason.value})"
