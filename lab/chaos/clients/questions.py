"""The questions of simulated users and how they ask them, drawn from a seed."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Sequence
from typing import Final


class Endpoint(enum.StrEnum):
    """The API that a user calls."""

    CHAT = "chat"
    """POST /v1/chat/completions"""
    COMPLETION = "completion"
    """POST /v1/completions, the prompt as token ids."""
    SDK_TEXT = "sdk text"
    """gRPC `Generate`: the router tokenizes."""
    SDK_TOKENS = "sdk tokens"
    """gRPC `Connect`: token ids over the stream that all of the SDK's requests share."""
    RESPONSE = "stored response"
    """POST /v1/responses. What is RESUMABLE or FLAKY is a background response."""


class Behaviour(enum.StrEnum):
    """How a client reads its answer."""

    PLAIN = "plain"
    """A stream that is lost when its connection breaks."""
    RESUMABLE = "resumable"
    """A stream that is resumed when its connection breaks."""
    FLAKY = "flaky"
    """A resumable stream whose client itself breaks the connection now and then."""
    SLOW = "slow"
    """A stream that is read slowly."""
    WHOLE = "whole"
    """Not streamed."""
    LEAVER = "leaver"
    """A stream whose client disconnects in the middle."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question with a deterministic answer: it is the same for every user, at any time and on any shard of its
    model."""

    prompt: str
    is_chat: bool
    """True when the prompt is rendered as a conversation. Otherwise its plain token ids are sent."""
    max_tokens: int
    temperature: float
    seed: int
    n: int = 1
    stop: tuple[str, ...] = ()
    model: str = ""
    previous_response_id: str = ""
    earlier: tuple[tuple[str, str], ...] = ()
    """The turns before it, each the prompt and the answer: those of the previous response and before that."""


@dataclasses.dataclass(frozen=True, slots=True)
class UserCall:
    """One question, and how it is asked."""

    question: Question
    endpoint: Endpoint
    behaviour: Behaviour
    breaks: tuple[int, ...] = ()
    """For FLAKY, how many further events are read before each break. For LEAVER, after how many events it leaves."""
    away_seconds: float = 0.0
    """How long a client stays away after a break."""


_SUBJECTS: Final = ("rivers", "clocks", "bread", "comets", "bridges", "whales", "tea", "maps", "glass", "chess")
_WISHES: Final = ("Tell me about", "Explain in simple words", "Write a short story about", "List facts about")
_HTTP_BEHAVIOURS: Final = (
    *(Behaviour.PLAIN,) * 4,
    *(Behaviour.RESUMABLE,) * 4,
    *(Behaviour.FLAKY,) * 4,
    *(Behaviour.WHOLE,) * 3,
    Behaviour.SLOW,
    Behaviour.LEAVER,
)
_SDK_BEHAVIOURS: Final = {
    # Nothing has to be resumed over the shared stream: the SDK continues by itself when it breaks.
    Endpoint.SDK_TOKENS: (*(Behaviour.PLAIN,) * 6, Behaviour.LEAVER),
    Endpoint.SDK_TEXT: (*(Behaviour.PLAIN,) * 3, *(Behaviour.RESUMABLE,) * 3, Behaviour.LEAVER),
}
RESPONSE_SEED: Final = 7
"""The models' default: requests for responses name none."""
_MAX_TURNS: Final = 5
_FOLLOWING_SHARE: Final = 0.6
"""The share of responses that follow on the user's last one."""


def draw_question(
    rng: random.Random, stop_words: Sequence[str], max_tokens: tuple[int, int], models: Sequence[str] = ("",)
) -> Question:
    """`stop_words` are words that occur in answers. `max_tokens` is the smallest and the largest limit. `models` are
    those that may be asked."""
    subjects = f"{rng.choice(_SUBJECTS)} and {rng.choice(_SUBJECTS)}"
    return Question(
        prompt=f"{rng.choice(_WISHES)} {subjects}, number {rng.randrange(10**6)}.",
        is_chat=rng.random() < 0.6,
        max_tokens=rng.randint(*max_tokens),
        temperature=0.0 if rng.random() < 0.4 else 1.0,
        seed=rng.getrandbits(63),
        n=2 if rng.random() < 0.15 else 1,
        stop=tuple(rng.sample(stop_words, min(4, len(stop_words)))) if rng.random() < 0.2 else (),
        model=rng.choice(models) if len(models) > 1 else models[0],
    )


def draw_call(rng: random.Random, question: Question) -> UserCall:
    if rng.random() < 0.25:
        endpoint = Endpoint.SDK_TEXT if question.is_chat else Endpoint.SDK_TOKENS
        behaviour = rng.choice(_SDK_BEHAVIOURS[endpoint])
    else:
        endpoint = Endpoint.CHAT if question.is_chat else Endpoint.COMPLETION
        behaviour = rng.choice(_HTTP_BEHAVIOURS)
    return _read_by(rng, question, endpoint, behaviour)


def draw_response(rng: random.Random, question: Question, last: Question | None) -> UserCall:
    """A question for a response that is stored. `last`: one that would follow on the user's last response."""
    question = dataclasses.replace(question, is_chat=True, n=1, stop=(), seed=RESPONSE_SEED)
    if last is not None and len(last.earlier) < _MAX_TURNS and rng.random() < _FOLLOWING_SHARE:
        named = {"previous_response_id": last.previous_response_id, "earlier": last.earlier, "model": last.model}
        question = dataclasses.replace(question, **named)
    return _read_by(rng, question, Endpoint.RESPONSE, rng.choice(_HTTP_BEHAVIOURS))


def _read_by(rng: random.Random, question: Question, endpoint: Endpoint, behaviour: Behaviour) -> UserCall:
    match behaviour:
        case Behaviour.FLAKY:
            breaks = tuple(rng.randrange(0, 12) for _ in range(rng.randint(1, 4)))
        case Behaviour.LEAVER:
            breaks = (rng.randrange(1, max(2, question.max_tokens)),)
        case _:
            breaks = ()
    return UserCall(question, endpoint, behaviour, breaks, away_seconds=rng.choice((0.0, 0.05, 0.5)))
