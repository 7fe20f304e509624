"""The data plane's workloads: the requests of the clients, and the pace of the simulated engine."""

from __future__ import annotations

import json
import random
from typing import Any, Final

import msgspec

# fmt: off
_WORDS: Final = (
    "about", "above", "after", "again", "along", "among", "animal", "answer", "around", "because", "before", "began",
    "between", "book", "carry", "change", "children", "city", "close", "country", "different", "earth", "enough",
    "every", "example", "family", "father", "follow", "found", "great", "group", "house", "important", "large",
    "learn", "letter", "light", "little", "might", "mother", "mountain", "never", "night", "number", "often", "paper",
    "people", "picture", "place", "plant", "point", "river", "school", "second", "sentence", "should", "small",
    "something", "sometimes", "sound", "spell", "state", "still", "story", "study", "those", "thought", "together",
    "under", "until", "water", "where", "while", "white", "without", "world", "would", "write", "young",
)
# fmt: on


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A closed loop: each connection sends its next request when the answer to the previous one is complete."""

    name: str
    about: str
    num_streams: int
    num_requests: int
    num_tokens: int
    """Tokens of every answer."""
    step_ms: float
    """Time of an engine step; 0: as fast as possible."""
    decode_every: int = 1
    """A stream gets a token in every n-th step."""
    prompt_bytes: int = 200
    num_groups: int = 0
    """Number of groups of prompts that share their first three quarters; 0: no two prompts are alike."""
    stagger_seconds: float = 0.0
    """The connections' first requests are spread over this time."""
    settle_seconds: float | None = None
    """How long after the first request memory is measured. None: at the end."""
    timeout_seconds: float = 120.0
    tools: tuple[str, ...] = ()
    """Names of the tools that the model may call."""
    is_stored: bool = False
    """The answers are stored by the orchestrator."""
    beside: Workload | None = None
    """Requests of other clients for as long as this workload is measured, from before its first request on. There must
    be more of them than can be answered meanwhile."""

    def scaled(self, share: float) -> Workload:
        """A smaller workload of the same kind."""
        if share == 1:
            return self
        return msgspec.structs.replace(
            self,
            num_streams=max(1, round(self.num_streams * share)),
            num_requests=max(1, round(self.num_requests * share)),
            stagger_seconds=self.stagger_seconds * share,
            settle_seconds=None,
        )


_W1: Final = Workload(
    name="W1",
    about="64 streams of 256 tokens, one every 20 ms",
    num_streams=64,
    num_requests=128,
    num_tokens=256,
    step_ms=20.0,
    stagger_seconds=0.5,
)
_W4: Final = Workload(
    name="W4",
    about="16 streams, prompts of 32 kB of which three quarters are shared by 25 requests, 16 tokens",
    num_streams=16,
    num_requests=500,
    num_tokens=16,
    step_ms=0.0,
    prompt_bytes=32_000,
    num_groups=20,
)


def beside_long_prompts(workload: Workload) -> Workload:
    """The same workload while 16 other clients send W4's prompts, to show what these do to its tokens."""
    others = msgspec.structs.replace(
        _W4, name="long prompts", num_requests=1500, timeout_seconds=10 * workload.timeout_seconds
    )
    return msgspec.structs.replace(
        workload, name=f"{workload.name}+W4", about=f"{workload.about}, beside W4's prompts", beside=others
    )


WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        _W1,
        Workload(
            name="W1x512",
            about="512 streams of 256 tokens, one every 20 ms",
            num_streams=512,
            num_requests=512,
            num_tokens=256,
            step_ms=20.0,
            stagger_seconds=2.0,
        ),
        Workload(
            name="W2",
            about="16 streams of 512 tokens, unpaced",
            num_streams=16,
            num_requests=160,
            num_tokens=512,
            step_ms=0.0,
        ),
        Workload(
            name="W3",
            about="32 streams of one-token answers",
            num_streams=32,
            num_requests=2000,
            num_tokens=1,
            step_ms=0.0,
        ),
        _W4,
        Workload(
            name="W5",
            about="4000 streams of 44 tokens, one every 500 ms, each at its own time",
            num_streams=4000,
            num_requests=4000,
            num_tokens=44,
            step_ms=20.0,
            decode_every=25,
            stagger_seconds=8.0,
            settle_seconds=16.0,
            timeout_seconds=180.0,
        ),
        beside_long_prompts(_W1),
    )
}


def request_bodies(workload: Workload, model: str, seed: int) -> list[bytes]:
    """The JSON of all requests. Another seed gives other prompts, and other groups."""
    draw = random.Random(seed)
    shared_bytes = workload.prompt_bytes * 3 // 4 if workload.num_groups else 0
    prefixes = [_text(draw, shared_bytes) for _ in range(workload.num_groups)]
    bodies: list[bytes] = []
    for number in range(workload.num_requests):
        own = f"{draw.getrandbits(48)} {_text(draw, workload.prompt_bytes - shared_bytes)}"
        prefix = f"{prefixes[number % len(prefixes)]} " if prefixes else ""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": prefix + own}],
            "max_tokens": workload.num_tokens,
            "temperature": 0,
            "stream": True,
        }
        if workload.is_stored:
            body["store"] = True
        if workload.tools:
            body["tools"] = [{"type": "function", "function": {"name": name}} for name in workload.tools]
        bodies.append(json.dumps(body).encode())
    return bodies


def _text(draw: random.Random, num_bytes: int) -> str:
    """Random words: the average word has 6.5 bytes with its space."""
    return " ".join(draw.choices(_WORDS, k=num_bytes * 2 // 13))
