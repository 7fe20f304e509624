"""The expected answer to a question, and the answer that a client received."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectedChoice:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """ "stop" or "length"."""
    text_lengths: tuple[int, ...]
    """The largest number of characters of `text` that can be visible after 1, 2, ... tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    choices: tuple[ExpectedChoice, ...]
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


class AnswerEnd(enum.StrEnum):
    """How an answer ended for its client."""

    COMPLETE = "complete"
    """The stream was terminated properly, or the whole body was received."""
    ERROR = "error"
    """An error event, an error status other than a rejection, or a failed RPC."""
    REFUSED = "refused"
    """Rejected as overloaded or unavailable, even after several tries."""
    UNREACHABLE = "unreachable"
    """No connection, even after several tries."""
    BROKEN = "broken"
    """The connection broke, and the answer was lost with it."""
    SILENT = "silent"
    """The client gave up waiting."""
    LEFT = "left"
    """The client disconnected on purpose."""


@dataclasses.dataclass(slots=True)
class ReceivedChoice:
    """One choice as its client received it."""

    text: str = ""
    token_ids: list[int] | None = None
    """None if the endpoint does not return token ids."""
    finish_reason: str | None = None

    def num_tokens(self, expected: ExpectedChoice) -> int:
        """The smallest number of tokens that can have been delivered for what was received."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return _num_tokens_for(len(self.text), expected.text_lengths)


@dataclasses.dataclass(slots=True)
class Transcript:
    """One answer, received over any number of connections. Times are those of the monotonic clock."""

    choices: list[ReceivedChoice]
    sent_at: float
    end: AnswerEnd = AnswerEnd.SILENT
    code: str = ""
    """The code of an error, or its HTTP status."""
    message: str = ""
    num_prompt_tokens: int | None = None
    """From the usage in the answer."""
    num_output_tokens: int | None = None
    num_events: int = 0
    """The number of the last event."""
    event_fault: str = ""
    """Describes an event that was repeated or skipped."""
    request_ids: list[str] = dataclasses.field(default_factory=list)
    """The ids of the request in the fabric. There are several if the client had to start over."""
    first_at: float | None = None
    last_at: float = 0.0
    was_away: bool = False
    """True when the client itself caused the pause before the next piece."""
    longest_pause_seconds: float = 0.0
    """The longest time between two pieces of the answer."""
    ended_at: float = 0.0
    num_breaks: int = 0
    """Connections that broke, other than by the client itself."""
    num_resumes: int = 0
    num_denials: int = 0
    """Answers that its key was not accepted, after which its client has used the next one."""
    limited_by: str = ""
    """The limit of its tenant that cut the answer short."""
    refusal_codes: frozenset[str] = frozenset()
    """The errors that the limits of its tenant explain."""
    num_takeovers: int = 0
    """Connections that an edge closed because the stream was being read at another edge."""
    num_refusals: int = 0
    """Rejections before the answer."""
    connection_log: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    """When its connections were opened, answered and closed, and how."""

    @classmethod
    def begin(cls, n: int, now: float, *, with_token_ids: bool = False) -> Transcript:
        return cls([ReceivedChoice(token_ids=[] if with_token_ids else None) for _ in range(n)], sent_at=now)

    def start_over(self) -> None:
        """Discard everything received so far."""
        for choice in self.choices:
            choice.text, choice.finish_reason = "", None
            if choice.token_ids is not None:
                choice.token_ids.clear()
        self.num_events = 0
        self.first_at = None
        self.limited_by = ""

    def log(self, what: str) -> None:
        self.connection_log.append((time.monotonic(), what))

    def record_piece(self, now: float) -> None:
        """Note that a piece of the answer was received."""
        if self.first_at is None:
            self.first_at = now
        elif not self.was_away:
            self.longest_pause_seconds = max(self.longest_pause_seconds, now - self.last_at)
        self.last_at, self.was_away = now, False

    def num_received_tokens(self, expected: Expected) -> int:
        """The smallest number of tokens that can have been delivered for what was received."""
        return sum(one.num_tokens(choice) for one, choice in zip(self.choices, expected.choices, strict=True))


def cut_short(expected: Expected, transcript: Transcript) -> Expected:
    """Returns what is expected of an answer that a limit has cut short somewhere: the beginning of it, but all of a
    choice that ended before that."""
    choices = []
    for choice, received in zip(expected.choices, transcript.choices, strict=True):
        count = received.num_tokens(choice)
        # The text of a choice that ended at a stop string is without that.
        is_whole = count >= len(choice.token_ids) or received.finish_reason == choice.finish_reason == "stop"
        choices.append(choice if is_whole else _beginning(choice, count))
    return dataclasses.replace(expected, choices=tuple(choices))


def _beginning(choice: ExpectedChoice, count: int) -> ExpectedChoice:
    length = choice.text_lengths[count - 1] if count else 0
    return ExpectedChoice(choice.text[:length], choice.token_ids[:count], "length", choice.text_lengths[:count])


def _num_tokens_for(num_chars: int, text_lengths: Sequence[int]) -> int:
    if num_chars == 0:
        return 0
    return next((count for count, length in enumerate(text_lengths, 1) if length >= num_chars), len(text_lengths))
