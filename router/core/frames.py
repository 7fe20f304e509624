"""The core's view of one engine step: the struct of arrays of `StepFrame`, free of protobuf.

The same shape comes in (slots are the shard stream's) and goes out (slots are the client stream's).
"""

from __future__ import annotations

import dataclasses

from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import FinishReason


@dataclasses.dataclass(slots=True)
class Start:
    """A sequence's first token is in this step."""

    slot: int
    num_cached_tokens: int
    queue_time_seconds: float = 0.0
    shard_id: str = ""
    """Filled in by the router."""


@dataclasses.dataclass(slots=True)
class Finish:
    """A sequence ended; nothing follows for its slot."""

    slot: int
    reason: FinishReason.ValueType
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    stop_string: str = ""
    error: KvloomError | None = None


@dataclasses.dataclass(slots=True)
class Step:
    """One entry per sequence with news in `slots`, `num_tokens` (empty: one each) and `deltas`; the rest is sparse."""

    slots: list[int] = dataclasses.field(default_factory=list)
    num_tokens: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    deltas: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[tuple[int, object]] = dataclasses.field(default_factory=list)
    """(slot, one token's logprobs): the second is opaque to the core. In the order of token_ids."""
    starts: list[Start] = dataclasses.field(default_factory=list)
    finishes: list[Finish] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.slots or self.finishes or self.starts)
