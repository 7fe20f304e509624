"""Thousands of answers at once whose safety service is killed, hangs and sends garbage: is a character shown that it
has not judged?"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import resource
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvloom.router_link.link import LinkRequest
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_CONTENT_FILTER,
    FINISH_REASON_STOP,
    SequenceFinish,
    SequenceStart,
    StopConditions,
)
from kvloom.v1.router_service_pb2 import GenerateRequest, Submit
from lab.redteam.campaign import num_leaked_chars
from lab.redteam.cases import RedTeamCase, cases_of
from lab.redteam.echo_engine import MAX_PARTS, MODEL, OTHERWISE, EchoEngine, told_to_write
from lab.redteam.fabric import RedTeamFabric, echo_fabric
from lab.redteam.faults import JudgedText, UnreliableSafety
from lab.redteam.rules import policy_text

_STEP_SECONDS: Final = 0.02
_STEP_SECONDS_PER_STREAM: Final = 0.00025
"""More than it takes to compute: all parts of the fabric and its clients share one event loop."""
_MAX_SECONDS: Final = 1800.0
_MAX_PART_CHARS: Final = 9
_SUBMITS_AT_ONCE: Final = 256
_POLL_SECONDS: Final = 0.005
_EVERYTHING: Final = """
[[rules]]
name = "everything"
message = "This is found nowhere."
patterns = ['\\x01{9}']
max_length = 9
"""
"""A rule whose matches begin anywhere, so that routers clear nothing by themselves: each character needs a verdict."""


@dataclasses.dataclass(frozen=True, slots=True)
class OutageReport:
    """Says what clients have seen."""

    num_streams: int
    fates: dict[str, int]
    """`whole`, `cut`, `refused`, or how else an answer has ended."""
    faults: dict[str, int]
    num_chars: int
    """Characters that clients have got."""
    num_unjudged_chars: int
    num_leaked_chars: int
    """Characters of forbidden texts that clients have got."""
    wrong: Sequence[str]
    """The streams that did not end as they should have, or that showed what they must not."""
    max_rss_mb: float

    @property
    def summary(self) -> str:
        """One paragraph."""
        return (
            f"{self.num_streams:,} answers at once, and {sum(self.faults.values())} faults ({_listed(self.faults)}): "
            f"{self.num_chars:,} characters shown, {self.num_unjudged_chars} without a verdict, "
            f"{self.num_leaked_chars} of forbidden texts. {_listed(self.fates).capitalize()}; {len(self.wrong)} not as "
            f"without faults. At most {self.max_rss_mb:,.0f} MB, fabric and clients together."
        )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


class _Stream:
    """One request, and what its client sees of the answer (a sink of the link)."""

    def __init__(self, case: RedTeamCase, judged: JudgedText) -> None:
        self.case = case
        self.is_in_prompt = case.number % 5 == 0
        self.name = f"stream-{case.number}"
        self.text = ""
        self.fate = ""
        self.num_unjudged_chars = 0
        self.ended = asyncio.Event()
        self._judged = judged

    @property
    def prompt(self) -> str:
        return self.case.written if self.is_in_prompt else told_to_write(self.case.written, _MAX_PART_CHARS)

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
        num_unjudged = len(self.text) - self._judged.num_clear_chars(self.name)
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


async def run_outages(redis_url: str, folder: Path, num_streams: int, seed: int = 0) -> OutageReport:
    """Ask for so many answers at once, and look at them until the last has ended."""
    policy = folder / "policy.toml"
    policy.write_text(policy_text() + _EVERYTHING, encoding="utf-8")
    safety = UnreliableSafety(policy, seed)
    streams = [_Stream(case, safety.judged) for case in itertools.islice(_cases(), num_streams)]
    async with _fabric_with(safety, redis_url, policy, num_streams) as fabric, asyncio.timeout(_MAX_SECONDS):
        engine = fabric.engine
        engine.may_write.clear()
        for number, stream in enumerate(streams):
            if number % _SUBMITS_AT_ONCE == 0:
                await _taken(number - _SUBMITS_AT_ONCE, engine, streams)
            fabric.link.submit(_request(stream, fabric), stream)
        await _taken(num_streams, engine, streams)
        engine.may_write.set()
        for stream in streams:
            await stream.ended.wait()
    return OutageReport(
        num_streams=num_streams,
        fates=dict(Counter(stream.fate for stream in streams)),
        faults=dict(safety.faults),
        num_chars=sum(len(stream.text) for stream in streams),
        num_unjudged_chars=sum(stream.num_unjudged_chars for stream in streams),
        num_leaked_chars=sum(stream.num_leaked_chars for stream in streams),
        wrong=[str(stream) for stream in streams if not stream.is_as_wanted],
        max_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


async def _taken(num_streams: int, engine: EchoEngine, streams: Sequence[_Stream]) -> None:
    """Return when the engine has so many requests, apart from those that were refused before (it has no event)."""
    while engine.num_submitted + sum(stream.ended.is_set() for stream in streams) < num_streams:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_SECONDS)


@contextlib.asynccontextmanager
async def _fabric_with(
    safety: UnreliableSafety, redis_url: str, policy: Path, num_streams: int
) -> AsyncIterator[RedTeamFabric]:
    step_seconds = _STEP_SECONDS + _STEP_SECONDS_PER_STREAM * min(num_streams, MAX_PARTS)
    await safety.start()
    try:
        async with echo_fabric(redis_url, policy, safety.port, step_seconds) as fabric:
            yield fabric
    finally:
        await safety.stop()


def _cases() -> Iterator[RedTeamCase]:
    """Harmless texts, and attacks that rules claim to find, of all seeds."""
    for seed in itertools.count():
        cases = [case for case in cases_of(seed) if case.is_claimed or case.layer is None]
        random.Random(seed).shuffle(cases)
        yield from cases


def _request(stream: _Stream, fabric: RedTeamFabric) -> LinkRequest:
    wanted = GenerateRequest(model=MODEL, stop=StopConditions(max_tokens=1000), n=1, safety_identifier=stream.name)
    submit = Submit(request=wanted, request_id=stream.name, prompt_text=stream.prompt)
    return LinkRequest(submit, fabric.tokenizer.encode_now(stream.prompt))
