"""Parses the server-sent events of an answer into its transcript. There is no I/O here."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from lab.chaos.clients.transcript import AnswerEnd, Transcript

_EVENT: Final = re.compile(rb"(?::[^\n]*\n)*(?:id: (\d+)\n)?(?:event: \S+\n)?data: (.*)", re.DOTALL)
_OF_CONNECTIONS: Final = ("stream_taken_over", "client_too_slow")
"""Errors about a connection and not about the answer."""
_ENDS: Final = {"completed": AnswerEnd.COMPLETE, "incomplete": AnswerEnd.COMPLETE, "failed": AnswerEnd.ERROR}
"""How a response has ended, by its status."""
_LAST_OF_RESPONSES: Final = frozenset(f"response.{status}" for status in _ENDS)


class EventReader:
    """Parses the bytes of one connection. `done` is set at the end of the answer. `notice` is the code of an error that
    concerns only the connection, so that the stream may be resumed."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._rest = b""
        self.done = False
        self.notice = ""

    def feed(self, piece: bytes, now: float, max_events: int | None = None) -> None:
        """Parse a piece. Events after number `max_events` of the whole answer are ignored."""
        *whole, self._rest = (self._rest + piece).split(b"\n\n")
        for event in whole:
            if self.done or self._transcript.num_events == max_events:
                return
            self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        transcript = self._transcript
        match = _EVENT.fullmatch(event)
        if match is None:
            transcript.event_fault = transcript.event_fault or f"not an event: {event[:80]!r}"
            return
        number, payload = match.groups()
        due = transcript.num_events + 1
        if number is None and payload.startswith(b'{"error"') and (code := error_in(payload)[0]) in _OF_CONNECTIONS:
            self.notice = code
            return
        chunk = None if payload == b"[DONE]" else json.loads(payload)
        if chunk is not None and chunk.get("type") == "error":  # a response's stream ends, and the response need not
            self.notice = chunk["code"]
            return
        # Events of a stream that cannot be resumed have no numbers, except those of responses.
        found = due if number is None else int(number)
        if chunk is not None and chunk.get("sequence_number", found - 1) != found - 1:
            found = chunk["sequence_number"] + 1
        if found != due:
            fault = f"event {found} came again" if found < due else f"events {due} to {found - 1} lost"
            transcript.event_fault = transcript.event_fault or fault
        transcript.num_events = found
        if chunk is None:
            transcript.end, self.done = AnswerEnd.COMPLETE, True
        elif "sequence_number" in chunk:
            self._take_response_event(chunk, now)
        else:
            self._take_chunk(chunk, now)

    def _take_response_event(self, event: dict[str, Any], now: float) -> None:
        [received] = self._transcript.choices
        if event["type"] == "response.output_text.delta":
            received.text += event["delta"]
            self._transcript.record_piece(now)
        elif event["type"] in _LAST_OF_RESPONSES:
            streamed, self.done = received.text, True
            take_response(self._transcript, event["response"])
            if self._transcript.end is AnswerEnd.COMPLETE and streamed != received.text:
                fault = "the texts of its events are not that of its last one"
                self._transcript.event_fault = self._transcript.event_fault or fault

    def _take_chunk(self, chunk: dict[str, Any], now: float) -> None:
        transcript = self._transcript
        if "error" in chunk:
            transcript.code, transcript.message = _error_of(chunk)
            transcript.end, self.done = AnswerEnd.ERROR, True
            return
        for choice in chunk["choices"]:
            take_choice(transcript, choice, choice.get("delta", choice))
            transcript.record_piece(now)
        take_usage(transcript, chunk.get("usage"))
        transcript.limited_by = chunk.get("kvloom", {}).get("limited_by", transcript.limited_by)


def take_choice(transcript: Transcript, choice: dict[str, Any], holder: dict[str, Any]) -> None:
    """`holder` is the object that has the text."""
    received = transcript.choices[choice["index"]]
    received.text += holder.get("content") or holder.get("text") or ""
    if choice.get("finish_reason") is not None:
        received.finish_reason = choice["finish_reason"]


def take_usage(transcript: Transcript, usage: dict[str, Any] | None) -> None:
    if usage:
        transcript.num_prompt_tokens = usage["prompt_tokens"]
        transcript.num_output_tokens = usage["completion_tokens"]


def take_body(transcript: Transcript, body: dict[str, Any], now: float) -> None:
    """Record an answer that was not streamed."""
    transcript.request_ids.append(body["id"])
    transcript.record_piece(now)
    if body["object"] == "response":
        take_response(transcript, body)
        return
    for choice in body["choices"]:
        take_choice(transcript, choice, choice.get("message", choice))
    take_usage(transcript, body.get("usage"))
    transcript.end = AnswerEnd.COMPLETE


def take_response(transcript: Transcript, response: dict[str, Any]) -> None:
    """Record a response as it is when it has ended. One that has not ended, or was cancelled, changes nothing."""
    if response["status"] not in _ENDS:
        return
    transcript.end = _ENDS[response["status"]]
    if transcript.end is AnswerEnd.ERROR:
        error = response["error"]
        transcript.code, transcript.message = error.get("type") or error["code"], error["message"]
        return
    [received] = transcript.choices
    parts = [part for item in response["output"] for part in item.get("content", ())]
    received.text = "".join(part["text"] for part in parts)
    received.finish_reason = "length" if response["status"] == "incomplete" else "stop"
    if usage := response["usage"]:
        transcript.num_prompt_tokens, transcript.num_output_tokens = usage["input_tokens"], usage["output_tokens"]


def error_in(body: bytes) -> tuple[str, str]:
    """Code and message in the body of an error. The code is "" if the body is not one of kvloom's errors."""
    try:
        return _error_of(json.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", body[:200].decode(errors="replace")


def _error_of(chunk: dict[str, Any]) -> tuple[str, str]:
    error = chunk["error"]
    return error.get("code") or error.get("type") or "", error.get("message") or ""
