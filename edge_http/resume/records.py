"""The records of a resumable response that its edge leaves for other edges: what was asked for, and how far it came.

A response has a hash of its own in Redis. It holds the response's caller and format (`ResponseRecord`), the requests to
a router (`RequestsRecord`) and, from time to time, a snapshot of all progress (`ProgressDelta`). Later progress is in
the edge's journal, as a `ProgressDelta` for each response that had any. Every number counts from the beginning of the
answer, so that a delta can be applied twice and a gap is noticed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from kvloom.v1.generation_pb2 import SequenceFinish, SequenceStart

RAW_EVENT = 0
"""The kind of an event that is stored in full. Other kinds are 1 + a choice's index: of these events only the choice's
text is stored, as a JSON string."""


class ResponseRecord(msgspec.Struct, array_like=True):
    number: int
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
    n: int
    prompt_sizes: list[int]
    """Tokens in each prompt. Choices are numbered across all prompts: prompt * n + choice."""
    caller: bytes
    idempotency_key: str
    body_digest: str
    guide_field: str
    tenant: str = ""
    """The name of the caller, which the requests carry; "" in records of edges that did not know it."""
    echoes: bool = False
    echo_logprobs: int | None = None
    """As in PromptReport."""


class RequestRecord(msgspec.Struct, array_like=True):
    """The request of one prompt to a router; protos are serialized."""

    request_id: str
    prompt_token_ids: bytes
    """Four bytes for each token, in the byte order of the machine."""
    prompt_text: str
    sampling: bytes
    """Includes a seed."""
    stop: bytes
    traceparent: str
    session_key: str
    tier: int
    client_request_id: str = ""


class RequestsRecord(msgspec.Struct, array_like=True):
    deadline_unix_seconds: float
    requests: list[RequestRecord]


class ChoiceProgressDelta(msgspec.Struct, array_like=True):
    index: int
    first_token: int
    token_ids: bytes
    """The tokens after the first `first_token` ones, four bytes each."""
    num_chars: int
    """Characters in the text of all tokens up to here."""


class AttemptRecord(msgspec.Struct, array_like=True):
    """See kvloom.router_link.tracked_request.Assignment."""

    link_id: str
    first_token: int
    num_tokens: int | None


class ProgressDelta(msgspec.Struct, array_like=True):
    """The progress of one response since an earlier one."""

    number: int
    num_events_before: int
    events: list[tuple[int, bytes]]
    choices: list[ChoiceProgressDelta]
    starts: list[tuple[int, bytes]]
    finishes: list[tuple[int, bytes]]
    attempts: list[tuple[int, list[AttemptRecord]]]
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
        self.attempts: list[list[AttemptRecord]] = [[] for _ in range(num_prompts)]
        self.num_events = 0
        self.events: list[tuple[int, bytes]] = []
        """The latest events as (kind, payload), without a gap, up to number `num_events`."""
        self.ended = False
        self.is_whole = True
        """No tokens are missing."""

    def apply_all(self, snapshot: ProgressDelta | None, journal: Sequence[ProgressDelta]) -> None:
        """The journal may begin before or after the snapshot, and may repeat deltas."""
        if snapshot is not None:
            self._apply_progress(snapshot)
        for delta in journal:
            self._apply_progress(delta)
            self._apply_events(delta.num_events_before, delta.events)
        if snapshot is not None:
            self._apply_events(snapshot.num_events_before, [])

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


def event_data(events: Sequence[tuple[int, bytes]], prefixes: Sequence[bytes], suffix: bytes) -> list[bytes]:
    """The data of server-sent events. `prefixes` and `suffix` are those of the choices' text events
    (edge_http/openai/response_formatters.py)."""
    return [payload if kind == RAW_EVENT else prefixes[kind - 1] + payload + suffix for kind, payload in events]
