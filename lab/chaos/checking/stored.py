"""Stored responses when all faults are over: whoever was told of one finds it, whole and as it was."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from lab.chaos.checking.verdicts import AnswerVerdict, Finding, judge
from lab.chaos.clients.http_client import HttpClient
from lab.chaos.clients.sse_reading import take_response
from lab.chaos.clients.transcript import AnswerEnd, Expected, Transcript

_END_SECONDS: Final = 60.0
"""How long responses may take to end, and the orchestrator to be back."""
_POLL_SECONDS: Final = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
    id: str
    user: str
    expected: Expected
    end: AnswerEnd
    """How it ended for its client."""
    is_background: bool
    """It is stored from the moment in which its client has the id. Others are when their client has the end."""


def judge_stored(one: StoredResponse, status: int, body: dict[str, Any]) -> Finding:
    """Compares what is found with what was promised. One that was not promised may be missing, not half there."""
    if status != 200:
        is_promised = one.is_background or one.end is AnswerEnd.COMPLETE
        return Finding(AnswerVerdict.LOST if is_promised else AnswerVerdict.LEFT, f"status {status}")
    found = Transcript.begin(1, 0.0)
    take_response(found, body)
    finding = judge(one.expected, found)
    if finding.verdict is AnswerVerdict.FAILED and not (one.is_background and one.end is AnswerEnd.ERROR):
        return Finding(AnswerVerdict.LOST, f"it has failed, and its client was not told: {found.message}")
    return finding


async def check_stored(http: HttpClient, responses: Sequence[StoredResponse]) -> tuple[Counter[str], list[str]]:
    """Returns the number of responses by verdict, and what must not be."""
    deadline = time.monotonic() + _END_SECONDS
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for one in responses:
        while True:
            status, body = await http.stored_response(one.id, one.user)
            is_final = status == 404 or body.get("status") in ("completed", "incomplete", "failed", "cancelled")
            if is_final or time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_SECONDS)
        finding = judge_stored(one, status, body)
        counts[finding.verdict] += 1
        if finding.verdict not in (AnswerVerdict.OK, AnswerVerdict.LEFT, AnswerVerdict.FAILED):
            problems.append(f"stored response {one.id} of {one.user}, {one.end}: {finding.verdict} {finding.detail}")
    return counts, problems
