"""What should have come, and what a client saw come."""

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
    """Characters of `text` that can be seen once so many tokens (1, 2 ...) are there, at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    choices: tuple[ExpectedChoice, ...]
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


class End(enum.StrEnum):
    """How it ended, as its client saw it."""

    COMPLETE = "complete"
    """The stream said that it is over, or the whole body is there."""
    ERROR = "error"
    """An error event, an error status that is no refusal, a failed RPC."""
    REFUSED = "refused"
    """"Not now", also after several tries."""
    UNREACHABLE = "unreachable"
    """No connection, also after several tries."""
    BROKEN = "broken"
    """The connection went, and the answer with it."""
    SILENT = "silent"
    """The client gave up waiting."""
    LEFT = "left"
    """The client went away, as it had meant to."""


@dataclasses.dataclass(slots=True)
class SeenChoice:
    text: str = ""
    token_ids: list[int] | None = None
    """Where the door tells them."""
    finish_reason: str | None = None


@dataclasses.dataclass(slots=True)
class Transcript:
    """One answer, over any number of connections. Times are of the monotonic clock."""

    choices: list[SeenChoice]
    sent_at: float
    end: End = End.SILENT
    code: str = ""
    """Of an error: its code, or its HTTP status."""
    message: str = ""
    num_prompt_tokens: int | None = None
    """Of the usage that came with the answer."""
    num_output_tokens: int | None = None
    num_events: int = 0
    """The number of the last event."""
    event_fault: str = ""
    """An event that came twice, or was left out."""
    request_ids: list[str] = dataclasses.field(default_factory=list)
    """What the fabric calls it; more than one when the client had to begin anew."""
    door: str = ""
    """The proxy through which it was last asked."""
    first_at: float | None = None
    last_at: float = 0.0
    was_away: bool = False
    """The client itself made the pause before the next piece."""
    longest_pause_seconds: float = 0.0
    """Between two pieces of the answer."""
    ended_at: float = 0.0
    num_breaks: int = 0
    """Connections that broke without the client's doing."""
    num_resumes: int = 0
    num_takeovers: int = 0
    """Connections that ended because the stream was read at another edge, or so that edge said."""
    num_refusals: int = 0
    """"Not now" that it was told before it was answered."""
    story: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    """When its connections began, were answered and ended, and how."""

    @classmethod
    def begin(cls, n: int, now: float, *, with_token_ids: bool = False) -> Transcript:
        return cls([SeenChoice(token_ids=[] if with_token_ids else None) for _ in range(n)], sent_at=now)

    def start_over(self) -> None:
        """Nothing of an earlier try counts."""
        for choice in self.choices:
            choice.text, choice.finish_reason = "", None
            if choice.token_ids is not None:
                choice.token_ids.clear()
        self.num_events = 0
        self.first_at = None

    def tell(self, what: str) -> None:
        self.story.append((time.monotonic(), what))

    def note_news(self, now: float) -> None:
        """A piece of the answer has come."""
        if self.first_at is None:
            self.first_at = now
        elif not self.was_away:
            self.longest_pause_seconds = max(self.longest_pause_seconds, now - self.last_at)
        self.last_at, self.was_away = now, False

    def num_seen_tokens(self, expected: Expected) -> int:
        """That must have been delivered for what was seen."""
        return sum(
            _num_tokens_for(len(seen.text), choice.text_lengths) if seen.token_ids is None else len(seen.token_ids)
            for seen, choice in zip(self.choices, expected.choices, strict=True)
        )


def _num_tokens_for(num_chars: int, text_lengths: Sequence[int]) -> int:
    if num_chars == 0:
        return 0
    return next((count for count, length in enumerate(text_lengths, 1) if length >= num_chars), len(text_lengths))
