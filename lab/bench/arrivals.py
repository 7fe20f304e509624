"""Requests that are sent to a fabric at random times, whether or not earlier ones have been answered, and how many it
can answer."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from lab.bench.bench_fabric import BenchFabric
from tools.bench.streams import MeasuredStream, numbered_prompt, play_one
from tools.failures import CommandError

MAX_ARRIVALS: Final = 20_000
"""One run has at most so many arrivals. The client is one process, and could not send more in time."""
_CLIENTS_PER_PLACE: Final = 2


class Requests(msgspec.Struct, frozen=True):
    """Draws prompts and answers with lengths between half of these and all of them."""

    num_prompt_words: int
    max_tokens: int
    seed: int

    def stream(
        self, number: int, group: str, *, run_name: str = "", api_key: str = "", is_batch: bool = False
    ) -> MeasuredStream:
        """Request number `number` of a group of requests: the same lengths and the same seed in each run. Its prompt
        begins with the run's name, so that no other run has cached any of it."""
        rng = random.Random(f"{self.seed} {group} {number}")
        num_words = rng.randint(max(1, self.num_prompt_words // 2), self.num_prompt_words)
        return MeasuredStream(
            f"{run_name}-{group}-{number}",
            rng.randint(max(1, self.max_tokens // 2), self.max_tokens),
            numbered_prompt(number, num_words, title=f"{run_name} {group}"),
            seed=number,
            api_key=api_key,
            is_batch=is_batch,
        )


def arrival_times(rate: float, begin: float, end: float, rng: random.Random) -> list[float]:
    """Returns the times of a Poisson process of `rate` per second, in seconds. Raises CommandError if there would be
    too many."""
    if rate * (end - begin) > MAX_ARRIVALS:
        raise CommandError(
            f"{rate:.0f} requests/s for {end - begin:g} s are more than this client can send: ask for longer answers"
        )
    times: list[float] = []
    at = begin + rng.expovariate(rate)
    while at < end:
        times.append(at)
        at += rng.expovariate(rate)
    return times


async def play_arrivals(
    fabric: BenchFabric,
    arrivals: Sequence[tuple[float, MeasuredStream]],
    is_awaited: Callable[[MeasuredStream], bool],
    max_wait_seconds: float,
) -> float:
    """Send each stream at its time, in seconds from now. Once those that are awaited have ended, or `max_wait_seconds`
    after the last one was sent, the clients of the others leave: these have neither a finish nor an error. Returns when
    the run began, in seconds since the epoch."""
    began = time.time()
    awaited: list[asyncio.Task[None]] = []
    others: list[asyncio.Task[None]] = []
    try:
        for at, stream in sorted(arrivals, key=lambda arrival: arrival[0]):
            await asyncio.sleep(max(0.0, began + at - time.time()))
            playing = asyncio.create_task(play_one(fabric.session, fabric.model, stream), name=stream.name)
            (awaited if is_awaited(stream) else others).append(playing)
        if awaited:
            await asyncio.wait(awaited, timeout=max_wait_seconds)
    finally:
        for task in (*awaited, *others):
            task.cancel()
        ended = await asyncio.gather(*awaited, *others, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception):
            raise error
    return began


async def measure_capacity(
    fabric: BenchFabric, requests: Requests, num_places: int, seconds: float, api_key: str = ""
) -> float:
    """The requests per second that the fabric answers when they never run out, measured over the last two thirds of
    `seconds`. `num_places` is how many answers run at the same time. Raises CommandError."""
    sent: list[MeasuredStream] = []
    numbers = itertools.count()

    async def ask_without_end() -> None:
        for number in numbers:
            sent.append(requests.stream(number, "capacity", run_name="capacity", api_key=api_key))
            await play_one(fabric.session, fabric.model, sent[-1])
            if sent[-1].error:
                raise CommandError(f"the fabric failed a request: {sent[-1].error}")

    clients = [asyncio.create_task(ask_without_end()) for _ in range(_CLIENTS_PER_PLACE * num_places)]
    try:
        began = time.time()
        failed, _ = await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in failed:
            task.result()
        return answers_per_second(sent, began + seconds / 3, began + seconds)
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


def answers_per_second(streams: Sequence[MeasuredStream], begin: float, end: float) -> float:
    """Between two times, in seconds since the epoch. An answer counts by the share of its text that came in between, so
    that a short time suffices. Raises CommandError."""
    finished = [stream for stream in streams if stream.has_finished]
    if not finished:
        raise CommandError("no answer came to its end while the capacity was measured: ask for shorter ones")
    pieces_per_answer = sum(len(stream.pieces_at) for stream in finished) / len(finished)
    num_pieces = sum(begin <= at < end for stream in streams for at in stream.pieces_at)
    return num_pieces / pieces_per_answer / (end - begin)
