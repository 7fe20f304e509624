"""Thousands of clients of one router, each of which compares what it sees with what has been judged."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import resource
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

from kvloom.router_link.link import GrpcRouterLink, LinkRequest
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_STOP,
    SequenceFinish,
    SequenceStart,
    StopConditions,
)
from kvloom.v1.router_service_pb2 import GenerateRequest, Submit
from lab.redteam.cases import RedTeamCase, cases_of, num_leaked_chars
from lab.redteam.echo_engine import MODEL, OTHERWISE, byte_tokenizer, told_to_write
from lab.redteam.processes import JudgedText, shared_state

_MAX_PART_CHARS: Final = 9
_SUBMITS_AT_ONCE: Final = 256
_POLL_SECONDS: Final = 0.005
_START_SECONDS: Final = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class SeenAnswers:
    """Says what clients have seen."""

    num_streams: int
    fates: dict[str, int]
    """`whole`, `cut`, `refused`, or how else an answer has ended."""
    num_chars: int
    """Characters that clients have got."""
    num_unjudged_chars: int
    num_leaked_chars: int
    """Characters of forbidden texts that clients have got."""
    wrong: Sequence[str]
    """The streams that did not end as they should have, or that showed what they must not."""
    max_rss_mb: float


def ask(router_address: str, num_streams: int) -> SeenAnswers:
    """Ask for so many answers at once, and look at them until the last has ended."""
    return asyncio.run(_ask(router_address, num_streams))


async def _ask(router_address: str, num_streams: int) -> SeenAnswers:
    state, tokenizer = shared_state(), byte_tokenizer()
    streams = [
        AskedStream(number, case, state.judged) for number, case in enumerate(itertools.islice(_cases(), num_streams))
    ]
    async with open_link(router_address) as link:
        for number, stream in enumerate(streams):
            if number % _SUBMITS_AT_ONCE == 0:
                await _taken(number - _SUBMITS_AT_ONCE, streams)
            link.submit(LinkRequest(stream.submit, tokenizer.encode_now(stream.prompt)), stream)
        await _taken(num_streams, streams)
        state.may_write.set()
        for stream in streams:
            await stream.ended.wait()
    return SeenAnswers(
        num_streams=num_streams,
        fates=dict(Counter(stream.fate for stream in streams)),
        num_chars=sum(len(stream.text) for stream in streams),
        num_unjudged_chars=sum(stream.num_unjudged_chars for stream in streams),
        num_leaked_chars=sum(stream.num_leaked_chars for stream in streams),
        wrong=[str(stream) for stream in streams if not stream.is_as_wanted],
        max_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


@contextlib.asynccontextmanager
async def open_link(router_address: str) -> AsyncIterator[GrpcRouterLink]:
    """A connection to a router that has a shard."""
    link = GrpcRouterLink(router_address, f"redteam-{os.getpid()}")
    await link.start()
    try:
        async with asyncio.timeout(_START_SECONDS):
            while not any(each.num_ready_shards for each in link.fleet.models):
                await link.wait_fleet_change()
        yield link
    finally:
        await link.close()


async def _taken(num_streams: int, streams: Sequence[AskedStream]) -> None:
    """Return when the engine has so many requests, apart from those that were refused before. Raises RuntimeError when
    the run is over."""
    state = shared_state()
    while state.num_taken.value + sum(stream.ended.is_set() for stream in streams) < num_streams:
        if state.is_over.is_set():
            raise RuntimeError("the fabric has ended")
        await asyncio.sleep(_POLL_SECONDS)


def _cases() -> Iterator[RedTeamCase]:
    """Harmless texts, and attacks that rules claim to find, of all seeds."""
    for seed in itertools.count():
        cases = [case for case in cases_of(seed) if case.is_claimed or case.layer is None]
        random.Random(seed).shuffle(cases)
        yield from cases


class AskedStream:
    """One request, and what its client sees of the answer (a sink of the link)."""

    def __init__(self, number: int, case: RedTeamCase, judged: JudgedText) -> None:
        self.case = case
        self.is_in_prompt = case.number % 5 == 0
        self.text = ""
        self.fate = ""
        self.num_unjudged_chars = 0
        self.ended = asyncio.Event()
        self._number = number
        self._judged = judged

    @property
    def prompt(self) -> str:
        return self.case.written if self.is_in_prompt else told_to_write(self.case.written, _MAX_PART_CHARS)

    @property
    def submit(self) -> Submit:
        name = str(self._number)
        wanted = GenerateRequest(model=MODEL, stop=StopConditions(max_tokens=1000), n=1, safety_identifier=name)
        return Submit(request=wanted, request_id=f"stream-{name}", prompt_text=self.prompt)

    @property
    def num_leaked_chars(self) -> int:
        return num_leaked_chars(self.case, [self.text]) if self.case.layer is not None else 0

    @property
    def is_as_wanted(self) -> bool:
        stopped = "refused" if self.is_in_prompt else "cut"
        wanted = "whole" if self.case.layer is None else stopped
        return self.fate == wanted and not self.num_unjudged_chars and not self.num_leaked_chars

    def on_start(self, index: int, start: SequenceStart) -> None:
        """Nothing is shown yet."""

    def on_tokens(self, index: int, delta: str, token_ids: Sequence[int], logprobs: Sequence[Any]) -> None:  # noqa: ARG002  (the link calls it)
        self.text += delta
        num_unjudged = len(self.text) - self._judged.num_clear_chars(self._number)
        self.num_unjudged_chars = max(self.num_unjudged_chars, num_unjudged)

    def on_finish(self, index: int, finish: SequenceFinish) -> None:  # noqa: ARG002
        whole = OTHERWISE if self.is_in_prompt else self.case.written
        if finish.reason == FINISH_REASON_CONTENT_FILTER:
            self.fate = "cut" if self.text or not self.is_in_prompt else "refused"
        elif finish.reason == FINISH_REASON_STOP and self.text == whole:
            self.fate = "whole"
        else:
            self.fate = finish.error.message or "incomplete"
        self.ended.set()

    def __str__(self) -> str:
        return f"{self.case}: {self.fate}, {self.num_unjudged_chars} characters without a verdict: {self.text!r}"
