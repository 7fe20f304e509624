"""The records of a resumable response that its edge leaves for other edges: what was asked for, and how far it came.

A response has a hash of its own in Redis. It holds the response's caller and format (`ResponseRecord`), the requests to
a router (`RequestsRecord`) and, from time to time, a snapshot of all progress (`ProgressDelta`). Later progress is in
the edge's journal, as a `ProgressDelta` for each response that had any. Every number counts from the beginning of the
answer, so that a delta can be applied twice and a gap is noticed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from google.protobuf.message import DecodeError, Message
from msgspec import Meta

from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart
from kvloom.v1.router_service_pb2 import Submit

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A number that is checked when it is read: the record may be of another version, or foreign."""
_TOKEN_BYTES: Final = 4
MAX_CHOICES: Final = 1024
"""The most choices of one prompt, and the largest number of prompts: above what requests may have."""

RAW_EVENT = 0
"""The kind of an event that is stored in full. Other kinds are 1 + a choice's index: of these events only the choice's
text is stored, as a JSON string."""


class ResponseRecord(msgspec.Struct, array_like=True):
    number: Count
    """Identifies the response in its edge's journal."""
    operation: str
    id: str
    created: int
    model: str
    system_fingerprint: str
    include_usage: bool
    with_details: bool
    with_explanation: bool
    headers: dict[str, str]
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
    prompt_sizes: Annotated[list[Count], Meta(min_length=1, max_length=MAX_CHOICES)]
    """Tokens in each prompt. Choices are numbered across all prompts: prompt * n + choice."""
    caller: bytes
    idempotency_key: str
    body_digest: str
    guide_field: str
    tenant: str = ""
    """The name of the caller, which the requests carry; "" in records of edges that did not know it."""
    shape: bytes = b""
    """The ResponseShape (edge_http/answers/shape.py); empty in records of edges that knew only one for each
    operation."""
    echoes: bool = False
    echo_logprobs: int | None = None
    """The value of the same name in PromptReport."""


class RequestsRecord(msgspec.Struct, array_like=True):
    deadline_unix_seconds: float
    requests: list[bytes]
    """The request of each prompt to a router: a serialized Submit, with a seed and the prompt, without choices."""

    def submits(self) -> list[Submit]:
        return [Submit.FromString(request) for request in self.requests]


class ChoiceProgressDelta(msgspec.Struct, array_like=True):
    index: Count
    first_token: Count
    token_ids: bytes
    """The tokens after the first `first_token` ones, four bytes each."""
    num_chars: Count
    """Characters in the text of all tokens up to here."""


class AssignmentRecord(msgspec.Struct, array_like=True):
    """See kvloom.router_link.tracked_request.Assignment."""

    link_id: str
    first_token: Count
    num_tokens: Count | None


class ProgressDelta(msgspec.Struct, array_like=True):
    """The progress of one response since an earlier one."""

    number: Count
    num_events_before: Count
    events: list[tuple[Count, bytes]]
    choices: list[ChoiceProgressDelta]
    starts: list[tuple[Count, bytes]]
    finishes: list[tuple[Count, bytes]]
    attempts: list[tuple[Count, list[AssignmentRecord]]]
    """By prompt; includes all attempts of a prompt whenever there is a new one."""
    ended: bool


encode = msgspec.msgpack.Encoder().encode
decode_response = msgspec.msgpack.Decoder(ResponseRecord).decode
decode_requests = msgspec.msgpack.Decoder(RequestsRecord).decode
decode_delta = msgspec.msgpack.Decoder(ProgressDelta).decode
decode_entry = msgspec.msgpack.Decoder(list[ProgressDelta]).decode


class AnswerState:
    """An answer as far as it is known, from all its progress deltas in the order of writing."""

    def __init__(self, num_choices: int, num_prompts: int) -> None:
        self.token_ids = [array("I") for _ in range(num_choices)]
        self.num_chars = [0] * num_choices
        self.starts: dict[int, SequenceStart] = {}
        self.finishes: dict[int, SequenceFinish] = {}
        self.attempts: list[list[AssignmentRecord]] = [[] for _ in range(num_prompts)]
        self.num_events = 0
        self.events: list[tuple[int, bytes]] = []
        """The latest events as (kind, payload), without a gap, up to number `num_events`."""
        self.ended = False
        self.is_whole = True
        """No tokens are missing."""

    def apply_all(self, snapshot: ProgressDelta | None, journal: Sequence[ProgressDelta]) -> None:
        """The journal may begin before or after the snapshot, and may repeat deltas. What cannot be of this answer is
        left out, and the answer is then not whole."""
        if snapshot is not None and self._fits(snapshot):
            self._apply_progress(snapshot)
        for delta in journal:
            if self._fits(delta):
                self._apply_progress(delta)
                self._apply_events(delta.num_events_before, delta.events)
        if snapshot is not None:
            self._apply_events(snapshot.num_events_before, [])

    def _fits(self, delta: ProgressDelta) -> bool:
        num_choices = len(self.token_ids)
        indexes = [choice.index for choice in delta.choices]
        indexes += [index for index, _ in (*delta.starts, *delta.finishes)]
        fits = (
            max(indexes, default=0) < num_choices
            and max((kind for kind, _ in delta.events), default=0) <= num_choices
            and max((prompt for prompt, _ in delta.attempts), default=0) < len(self.attempts)
            and all(len(choice.token_ids) % _TOKEN_BYTES == 0 for choice in delta.choices)
            and all(_is_message(SequenceStart, start) for _, start in delta.starts)
            and all(_is_message(SequenceFinish, finish) for _, finish in delta.finishes)
        )
        self.is_whole = self.is_whole and fits
        return fits

    def _apply_progress(self, delta: ProgressDelta) -> None:
        for choice in delta.choices:
            self._apply_tokens(choice)
        for index, start in delta.starts:
            self.starts.setdefault(index, SequenceStart.FromString(start))
        for index, finish in delta.finishes:
            self.finishes.setdefault(index, SequenceFinish.FromString(finish))
        for prompt, attempts in delta.attempts:
            if len(attempts) >= len(self.attempts[prompt]):
                self.attempts[prompt] = attempts
        self.ended = self.ended or delta.ended

    def _apply_events(self, num_before: int, events: list[tuple[int, bytes]]) -> None:
        if num_before > self.num_events:
            self.num_events, self.events = num_before, []
        num_new = num_before + len(events) - self.num_events
        if num_new > 0:
            self.events += events[-num_new:]
            self.num_events += num_new

    def _apply_tokens(self, delta: ChoiceProgressDelta) -> None:
        known = self.token_ids[delta.index]
        token_ids = array("I", delta.token_ids)
        if delta.first_token > len(known):
            self.is_whole = False
            return
        known.extend(token_ids[len(known) - delta.first_token :])
        self.num_chars[delta.index] = max(self.num_chars[delta.index], delta.num_chars)


def can_continue(response: ResponseRecord, requests: RequestsRecord) -> bool:
    """Returns True when the requests can be those of the response."""
    return len(requests.requests) == len(response.prompt_sizes) and all(map(_is_submit, requests.requests))


def _is_submit(raw: bytes) -> bool:
    try:
        submit = Submit.FromString(raw)
    except DecodeError:
        return False
    return submit.HasField("request") and len(submit.packed_prompt_token_ids) % _TOKEN_BYTES == 0


def _is_message(kind: type[Message], raw: bytes) -> bool:
    try:
        kind.FromString(raw)
    except DecodeError:
        return False
    return True


def event_data(events: Sequence[tuple[int, bytes]], prefixes: Sequence[bytes], suffix: bytes) -> list[bytes]:
    """The data of server-sent events. `prefixes` and `suffix` are those of the choices' text events
    (edge_http/formatting/response_formatter.py)."""
    return [payload if kind == RAW_EVENT else prefixes[kind - 1] + payload + suffix for kind, payload in events]
