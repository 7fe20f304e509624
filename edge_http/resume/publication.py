"""How much of one resumable response the journal has, and what has to be written to it next. It does no I/O."""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Sequence

from edge_http.answers.recorded_answer import RecordedAnswer
from edge_http.resume.records import (
    RAW_EVENT,
    AssignmentRecord,
    ChoiceProgressDelta,
    ProgressDelta,
    RequestsRecord,
    ResponseRecord,
    encode,
)
from edge_http.resume.resumable_stream import ResumableStream
from kvloom.router_link.tracked_request import Assignment

_numbers = itertools.count(1)


@dataclasses.dataclass(slots=True)
class _Progress:
    """How far an answer had come when a delta was made; the lists are by choice."""

    num_tokens: list[int]
    num_chars: list[int]
    num_starts: int = 0
    num_finishes: int = 0
    last_attempts: tuple[Assignment | None, ...] = ()


class Publication:
    """Tracks what the journal knows of one response."""

    def __init__(
        self,
        stream: ResumableStream,
        response: ResponseRecord,
        requests: RequestsRecord,
        answer: RecordedAnswer,
        prefixes: Sequence[bytes],
    ) -> None:
        """`prefixes` are those of the choices' text events."""
        self.stream = stream
        self.release = stream.release
        response.number = next(_numbers)
        self.response = response
        self.attempts: list[Sequence[Assignment]] = [() for _ in response.prompt_sizes]
        """By prompt: the attempts of its request, one for each link; the lists grow."""
        self.earlier_attempts: list[list[AssignmentRecord]] = [[] for _ in response.prompt_sizes]
        """By prompt: the attempts of edges that had the response before."""
        self.is_taken_over = False
        """Another edge began the response."""
        self.is_kept_here = False
        """No other edge may continue the response, because it has been continued by another model than its requests
        name."""
        self.is_noted = False
        """Used by the commit gate."""
        self.num_published = stream.log.num_forgotten
        """The number of the last event that the journal has."""
        self.fresh: list[bytes] = []
        """Prefix and payload of the events since then, as long as the publisher keeps up."""
        self.opened = False
        """The journal has the response's records."""
        self.end_published = False
        self.snapshot_at = 0.0
        """When the last snapshot was written; 0: the next write includes one."""
        self.snapshot_position = 0
        """How many bytes had been written to the journal by then."""
        self._requests: RequestsRecord | None = requests
        self._answer: RecordedAnswer | None = answer
        self._kinds = {prefix: kind for kind, prefix in enumerate(prefixes, 1)}
        self._published = self._no_progress
        self._pending = self._no_progress
        self._pending_events = 0
        self._pending_end = False

    @property
    def num_events(self) -> int:
        return self.stream.num_events

    @property
    def _no_progress(self) -> _Progress:
        zeros = [0] * (len(self.response.prompt_sizes) * self.response.n)
        return _Progress(zeros, zeros)

    def encode_requests(self) -> bytes:
        """The requests to repeat at a router; b"" once the answer has ended."""
        return b"" if self._requests is None else encode(self._requests)

    def keep_here(self) -> None:
        """From now on no other edge may continue it."""
        self.is_kept_here = True
        self._requests = None

    def start_over(self) -> None:
        """The journal has lost everything."""
        self.opened = self.end_published = False
        self.snapshot_at = 0.0
        self.num_published = self.stream.log.num_forgotten
        self._published = self._no_progress

    def has_unpublished(self) -> bool:
        stream = self.stream
        return not self.opened or self.num_published < stream.num_events or stream.ended != self.end_published

    def drain(self) -> ProgressDelta:
        """The progress since the last write. `mark_written` has to be called once it is written."""
        log = self.stream.log
        fresh, self.fresh = self.fresh, []
        before = max(self.num_published, log.num_forgotten)
        if self.num_published + len(fresh) // 2 == log.num_events:
            before = self.num_published
            kinds = self._kinds
            pairs = iter(fresh)
            events = [
                (kind, payload) if (kind := kinds.get(prefix, RAW_EVENT)) and payload else (RAW_EVENT, prefix + payload)
                for prefix, payload in zip(pairs, pairs, strict=True)
            ]
        else:
            events = [(RAW_EVENT, event) for event in log.read_all(before)]
        self._pending_events = log.num_events
        self._pending_end = self.stream.ended
        return self._progress_since(self._published, before, events)

    def snapshot(self) -> ProgressDelta:
        """All progress, without the events."""
        return self._progress_since(self._no_progress, self.stream.num_events, [])

    def mark_written(self) -> None:
        self.num_published = self._pending_events
        self.end_published = self._pending_end
        self._published = self._pending
        if self._pending_end:
            self._answer = self._requests = None  # prompts may be long

    def _progress_since(
        self, since: _Progress, num_events_before: int, events: list[tuple[int, bytes]]
    ) -> ProgressDelta:
        answer = self._answer
        if answer is None:
            return ProgressDelta(self.response.number, num_events_before, events, [], [], [], [], self.stream.ended)
        num_tokens = [len(choice.token_ids) for choice in answer.choices]
        num_chars = [choice.num_chars for choice in answer.choices]
        choices = [
            ChoiceProgressDelta(index, known, choice.token_ids[known:].tobytes(), choice.num_chars)
            for index, choice in enumerate(answer.choices)
            if (known := since.num_tokens[index]) < num_tokens[index] or since.num_chars[index] < num_chars[index]
        ]
        starts: list[tuple[int, bytes]] = []
        if len(answer.starts) > since.num_starts:
            new = itertools.islice(answer.starts.items(), since.num_starts, None)
            starts = [(index, start.SerializeToString()) for index, start in new]
        finishes: list[tuple[int, bytes]] = []
        if len(answer.finishes) > since.num_finishes:
            ended = itertools.islice(answer.finishes.items(), since.num_finishes, None)
            finishes = [(index, finish.SerializeToString()) for index, finish in ended]
        last_attempts = tuple(attempts[-1] if attempts else None for attempts in self.attempts)
        attempts: list[tuple[int, list[AssignmentRecord]]] = []
        if last_attempts != since.last_attempts:
            attempts = list(enumerate(map(self._attempts_of, range(len(self.attempts)))))
        self._pending = _Progress(num_tokens, num_chars, len(answer.starts), len(answer.finishes), last_attempts)
        return ProgressDelta(
            self.response.number, num_events_before, events, choices, starts, finishes, attempts, self.stream.ended
        )

    def _attempts_of(self, prompt: int) -> list[AssignmentRecord]:
        own = [AssignmentRecord(one.link_id, one.first_token, one.num_tokens) for one in self.attempts[prompt]]
        return self.earlier_attempts[prompt] + own


def packed(token_ids: Sequence[int]) -> bytes:
    """Four bytes for each token, in the byte order of the machine."""
    return (token_ids if isinstance(token_ids, array) else array("I", token_ids)).tobytes()
