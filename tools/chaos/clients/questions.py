"""What users ask, and how: drawn from a seed, before anything runs."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Sequence
from typing import Final


class Door(enum.StrEnum):
    CHAT = "chat"
    """POST /v1/chat/completions"""
    COMPLETION = "completion"
    """POST /v1/completions, the prompt as token ids."""
    SDK_TEXT = "sdk text"
    """gRPC `Generate`: the router tokenizes."""
    SDK_TOKENS = "sdk tokens"
    """gRPC `Connect`: token ids over the stream that all of the SDK's requests share."""


class Manner(enum.StrEnum):
    PLAIN = "plain"
    """A stream; when its connection breaks, it is gone."""
    RESUMABLE = "resumable"
    """A stream that is taken up again when its connection breaks."""
    FLAKY = "flaky"
    """As above, and the client itself breaks it off now and then."""
    SLOW = "slow"
    """A stream that is read slowly."""
    WHOLE = "whole"
    """Not streamed."""
    LEAVER = "leaver"
    """A stream whose client goes away in the middle."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """Whoever asks it gets the same answer, whenever and wherever."""

    prompt: str
    is_chat: bool
    """Rendered as a conversation; else the prompt's plain token ids."""
    max_tokens: int
    temperature: float
    seed: int
    n: int = 1
    stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Errand:
    question: Question
    door: Door
    manner: Manner
    breaks: tuple[int, ...] = ()
    """FLAKY: how many further events are read before each break. LEAVER: one number, after which the client leaves."""
    away_seconds: float = 0.0
    """How long a client stays away after a break."""


_SUBJECTS: Final = ("rivers", "clocks", "bread", "comets", "bridges", "whales", "tea", "maps", "glass", "chess")
_WISHES: Final = ("Tell me about", "Explain in simple words", "Write a short story about", "List facts about")
_HTTP_MANNERS: Final = (
    *(Manner.PLAIN,) * 4,
    *(Manner.RESUMABLE,) * 4,
    *(Manner.FLAKY,) * 4,
    *(Manner.WHOLE,) * 3,
    Manner.SLOW,
    Manner.LEAVER,
)
_SDK_MANNERS: Final = {
    # Over the shared stream nothing has to be resumed: the SDK goes on by itself when it breaks.
    Door.SDK_TOKENS: (*(Manner.PLAIN,) * 6, Manner.LEAVER),
    Door.SDK_TEXT: (*(Manner.PLAIN,) * 3, *(Manner.RESUMABLE,) * 3, Manner.LEAVER),
}


def draw_question(rng: random.Random, stop_words: Sequence[str], max_tokens: tuple[int, int]) -> Question:
    """`stop_words`: some of what answers are made of. `max_tokens`: the least and the most."""
    subjects = f"{rng.choice(_SUBJECTS)} and {rng.choice(_SUBJECTS)}"
    return Question(
        prompt=f"{rng.choice(_WISHES)} {subjects}, number {rng.randrange(10**6)}.",
        is_chat=rng.random() < 0.6,
        max_tokens=rng.randint(*max_tokens),
        temperature=0.0 if rng.random() < 0.4 else 1.0,
        seed=rng.getrandbits(63),
        n=2 if rng.random() < 0.15 else 1,
        stop=tuple(rng.sample(stop_words, min(4, len(stop_words)))) if rng.random() < 0.2 else (),
    )


def draw_errand(rng: random.Random, question: Question) -> Errand:
    """How it is asked."""
    if rng.random() < 0.25:
        door = Door.SDK_TEXT if question.is_chat else Door.SDK_TOKENS
        manner = rng.choice(_SDK_MANNERS[door])
    else:
        door = Door.CHAT if question.is_chat else Door.COMPLETION
        manner = rng.choice(_HTTP_MANNERS)
    match manner:
        case Manner.FLAKY:
            breaks = tuple(rng.randrange(0, 12) for _ in range(rng.randint(1, 4)))
        case Manner.LEAVER:
            breaks = (rng.randrange(1, max(2, question.max_tokens)),)
        case _:
            breaks = ()
    return Errand(question, door, manner, breaks, away_seconds=rng.choice((0.0, 0.05, 0.5)))
