"""What an edge leaves for the others of a resumable answer: what it was asked for, and what has come of it.

A response has a hash of its own in Redis: who may have it and how its events look (`ResponseRecord`), what a router has
to be asked for (`RequestsRecord`), and from time to time all that has come (`ProgressDelta`). What came since lies in
its edge's journal, a `ProgressDelta` of each response that had any. Every number counts from the beginning of the
answer, so that news can be taken twice, and a gap shows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart

RAW_EVENT = 0
"""An event that is written out. Others are a choice's text: 1 + the choice's number, and a JSON string."""


class ResponseRecord(msgspec.Struct, array_like=True):
    number: int
    """Of the response in its edge's journal."""
    operation: str
    id: str
    created: int
    model: str
    system_fingerprint: str
    include_usage: bool
    with_details: bool
    with_explanation: bool
    headers: dict[str, str]
    n: int
    prompt_sizes: list[int]
    """Tokens of each prompt. Choices are numbered through all prompts: prompt * n + choice."""
    caller: bytes
    idempotency_key: str
    body_digest: str
    guide_field: str


class RequestRecord(msgspec.Struct, array_like=True):
    """One prompt's request to a router; protos are bytes."""

    request_id: str
    prompt_token_ids: bytes
    """Four bytes each, in the byte order of the machine."""
    prompt_text: str
    sampling: bytes
    """With a seed."""
    stop: bytes
    traceparent: str
    session_key: str
    tier: int


class RequestsRecord(msgspec.Struct, array_like=True):
    deadline_unix_seconds: float
    requests: list[RequestRecord]


class ChoiceProgressDelta(msgspec.Struct, array_like=True):
    index: int
    first_token: int
    token_ids: bytes
    """Behind the `first_token` ones that are known, four bytes each."""
    num_chars: int
    """Of the text of all tokens up to here."""


class AttemptRecord(msgspec.Struct, array_like=True):
    """See kvloom.router_link.tracked_request.Attempt."""

    link_id: str
    first_token: int
    num_tokens: int | None


class ProgressDelta(msgspec.Struct, array_like=True):
    """Of one response."""

    number: int
    num_events_before: int
    events: list[tuple[int, bytes]]
    choices: list[ChoiceProgressDelta]
    starts: list[tuple[int, bytes]]
    finishes: list[tuple[int, bytes]]
    attempts: list[tuple[int, list[AttemptRecord]]]
    """By prompt; all of a prompt whenever there is one more."""
    ended: bool


encode = msgspec.msgpack.Encoder().encode
decode_response = msgspec.msgpack.Decoder(ResponseRecord).decode
decode_requests = msgspec.msgpack.Decoder(RequestsRecord).decode
decode_news = msgspec.msgpack.Decoder(ProgressDelta).decode
decode_entry = msgspec.msgpack.Decoder(list[ProgressDelta]).decode


class AnswerState:
    """An answer as far as it is known, from all news of it in the order of writing."""

    def __init__(self, num_choices: int, num_prompts: int) -> None:
        self.token_ids = [array("I") for _ in range(num_choices)]
        self.num_chars = [0] * num_choices
        self.starts: dict[int, SequenceStart] = {}
        self.finishes: dict[int, SequenceFinish] = {}
        self.attempts: list[list[AttemptRecord]] = [[] for _ in range(num_prompts)]
        self.num_events = 0
        self.events: list[tuple[int, bytes]] = []
        """The latest, without a gap, up to number `num_events`."""
        self.ended = False
        self.is_whole = True
        """No tokens are missing."""

    def take_all(self, snapshot: ProgressDelta | None, journal: Sequence[ProgressDelta]) -> None:
        """The journal may begin before or after the snapshot."""
        if snapshot is not None:
            self._take_progress(snapshot)
        for news in journal:
            self.take(news)
        if snapshot is not None:
            self._take_events(snapshot.num_events_before, [])

    def take(self, news: ProgressDelta) -> None:
        """Also again."""
        self._take_progress(news)
        self._take_events(news.num_events_before, news.events)

    def _take_progress(self, news: ProgressDelta) -> None:
        for choice in news.choices:
            self._take_tokens(choice)
        for index, start in news.starts:
            self.starts.setdefault(index, SequenceStart.FromString(start))
        for index, finish in news.finishes:
            self.finishes.setdefault(index, SequenceFinish.FromString(finish))
        for prompt, attempts in news.attempts:
            if len(attempts) >= len(self.attempts[prompt]):
                self.attempts[prompt] = attempts
        self.ended = self.ended or news.ended

    def _take_events(self, num_before: int, events: list[tuple[int, bytes]]) -> None:
        if num_before > self.num_events:
            self.num_events, self.events = num_before, []
        num_new = num_before + len(events) - self.num_events
        if num_new > 0:
            self.events += events[-num_new:]
            self.num_events += num_new

    def _take_tokens(self, news: ChoiceProgressDelta) -> None:
        known = self.token_ids[news.index]
        token_ids = array("I", news.token_ids)
        if news.first_token > len(known):
            self.is_whole = False
            return
        known.extend(token_ids[len(known) - news.first_token :])
        self.num_chars[news.index] = max(self.num_chars[news.index], news.num_chars)


def framed_events(first_number: int, events: Sequence[tuple[int, bytes]], prefixes: Sequence[bytes], suffix: bytes):
    """As HTTP/1.1 sends them, each in its chunk. `prefixes`, `suffix`: of the choices' texts
    (edge_http/openai/response_formatters.py)."""
    framed: list[bytes] = []
    for number, (kind, payload) in enumerate(events, first_number):
        data = payload if kind == RAW_EVENT else prefixes[kind - 1] + payload + suffix
        event = b"id: %d\ndata: %b\n\n" % (number, data)
        framed.append(b"%x\r\n%b\r\n" % (len(event), event))
    return framed


def raw_event(framed: bytes, number: int) -> tuple[int, bytes]:
    """The other way round: an event of a log."""
    begin = framed.index(b"\r\n") + 2 + len(b"id: %d\ndata: " % number)
    return RAW_EVENT, framed[begin:-4]
