"""Brings streams to their end that are stored before their last event is sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from edge_http.answers.cascade_candidate import CascadeCandidate
from edge_http.answers.kept_answer import KeptAnswer
from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.edge import Edge
from edge_http.submission import OnSubmitted, RunAnswer, Submission
from kvloom.errors import KvloomError

Keep = Callable[[bytes, Sequence[int]], Awaitable[None]]
"""Stores the JSON of a response, and the tokens of its output. Raises KvloomError."""


class KeptRun:
    """Brings a stream to its end, and stores it before its last event is sent."""

    def __init__(self, run: RunAnswer, keep: Keep) -> None:
        self._run = run
        self._keep = keep

    async def __call__(
        self, edge: Edge, submission: Submission, answer: StreamedAnswer, on_submitted: OnSubmitted = lambda *_: None
    ) -> None:
        await self._run(edge, submission, answer, on_submitted)
        await _kept(answer, self._keep)


class KeptCandidate:
    """A candidate's answer that was held, and that is stored before its last event is sent."""

    def __init__(self, held: CascadeCandidate, keep: Keep) -> None:
        self.response_id = held.response_id
        self._held = held
        self._keep = keep

    async def deliver(self, answer: StreamedAnswer, *more: Any) -> None:
        await self._held.deliver(answer, *more)
        await _kept(answer, self._keep)


async def _kept(answer: StreamedAnswer, keep: Keep) -> None:
    """Raises the KvloomError because of which the answer could not be stored."""
    assert isinstance(answer, KeptAnswer)
    try:
        await keep(answer.response_json(), answer.token_ids)
    except KvloomError as error:
        answer.release(error)
        raise
    answer.release()
