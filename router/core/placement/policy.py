"""What a placement policy is: from the shards as a request sees them, the named terms of each one's cost."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar

import msgspec


class Candidate(msgspec.Struct):
    """One shard that could take the request now."""

    shard_id: str
    turn: int
    """When it was last sent a request, as a count of requests; 0: never."""
    block_size: int
    num_blocks: int
    num_overlap_tokens: int
    """Prompt tokens whose KV lies there (or is about to)."""
    num_prefill_tokens: int
    """Tokens of the request that it would have to compute."""
    num_queued_prefill_tokens: int
    """Of requests before this one, less what lies in the cache for them."""
    num_running: int
    """Sequences that decode."""
    num_waiting: int
    """Sequences without a first token."""
    num_context_tokens: int
    """Held by the sequences that decode."""
    num_used_blocks: float
    """Held by running and waiting sequences; what is merely cached does not count."""
    num_evicted_blocks: int
    """Cached blocks that the request would push out."""
    reuse_probability: float
    """That those would have been used again; 0 where there are none."""
    queue_seconds: float
    """Until the prefill before this request is done."""
    memory_wait_seconds: float
    """Until sequences that run have freed enough blocks for this request."""
    own_seconds: float
    """Prefill of the request itself, at the shard's learned speed and its present decode load."""
    seconds_per_token: float
    """Of short prefills."""
    bound_arrival_rate: float
    """Requests per second that lately came for what is cached there, each counted as its cached share."""
    utilisation: float
    """Share of its time that it was busy with their prefill."""
    held_seconds: Sequence[float] = ()
    """Own prefill of each request that waits in the router to be sent there."""

    @property
    def predicted_ttft_seconds(self) -> float:
        return self.queue_seconds + self.held_ahead_seconds + self.own_seconds

    @property
    def held_ahead_seconds(self) -> float:
        """Of those that wait in the router, those that go before this request: the shorter ones."""
        if not self.held_seconds:
            return 0.0
        own = self.own_seconds
        return sum(seconds for seconds in self.held_seconds if seconds <= own)

    @property
    def num_held_behind(self) -> int:
        if not self.held_seconds:
            return 0
        own = self.own_seconds
        return sum(seconds > own for seconds in self.held_seconds)

    @property
    def num_new_blocks(self) -> int:
        return -(-self.num_prefill_tokens // self.block_size)


class Arrival(msgspec.Struct, frozen=True):
    """The request that is placed."""

    request_id: str
    session_key: str
    num_tokens: int
    """To have KV for: the prompt, and what earlier attempts emitted."""
    block_hashes: Sequence[int]
    """Of the prompt's full blocks (of the first candidate's block size)."""


class QueueHoldPolicy(msgspec.Struct, frozen=True):
    """Requests wait in the router while their shard has enough to do, and go shortest prefill first.

    A shard gets more when its queued prefill is below either bound: more than the way there and back takes, so that it
    never runs dry, and enough short prompts to fill one of its steps; otherwise little, so that few requests are bound
    to a place in its queue before they need be.
    """

    backlog_seconds: float
    shared_backlog_seconds: float
    """The same for a shard on which other routers' requests are: what those keep back is not known here, so a place in
    the engine's queue is worth more."""
    backlog_tokens: int
    aging: float
    """Seconds of prefill that a second of waiting makes up for."""


class Policy(abc.ABC):
    """One object per router core. Deterministic; may remember what it placed, within a bound."""

    terms: ClassVar[tuple[str, ...]]
    """Names of the parts of a cost."""
    hold: QueueHoldPolicy | None = None
    """None: what is placed is sent at once."""

    @abc.abstractmethod
    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        """One tuple a candidate, parallel to `terms`; the lowest sum wins. In seconds, or in the policy's own unit."""

    def placed(self, arrival: Arrival, shard_id: str) -> None:  # noqa: B027  (most policies remember nothing)
        """The request was sent there."""
