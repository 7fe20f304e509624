"""The interface of a placement policy: from the shards as a request sees them, it computes the named terms of each
one's cost."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class Candidate(msgspec.Struct):
    """One shard that could take the request now."""

    shard_id: str
    turn: int
    """When it was last sent a request, as a count of requests; 0: never."""
    block_size: int
    num_blocks: int
    num_overlap_tokens: int
    """Prompt tokens whose KV is there, or is about to be."""
    num_prefill_tokens: int
    """Tokens of the request that it would have to compute."""
    num_queued_prefill_tokens: int
    """Prefill tokens of earlier requests there, less those that are cached for them."""
    num_running: int
    """Sequences that decode."""
    num_waiting: int
    """Sequences without a first token."""
    num_context_tokens: int
    """Context tokens of the sequences that decode."""
    num_used_blocks: float
    """Blocks held by running and waiting sequences; blocks that are merely cached do not count."""
    num_evicted_blocks: int
    """Cached blocks that the request would evict."""
    reuse_probability: float
    """The probability that those would have been used again; 0 where there are none."""
    queue_seconds: float
    """Time until the prefill queued before this request is done."""
    memory_wait_seconds: float
    """Time until running sequences have freed enough blocks for this request."""
    memory_pressure_seconds: float
    """The cost, in seconds, that taking its blocks has for requests that come later."""
    decode_delay_seconds: float
    """By how much it and the sequences there decode longer for each other's context, weighted by the share of the time
    before the objective for a step that context takes."""
    own_seconds: float
    """Prefill time of the request itself, at the shard's learned speed and present decode load."""
    bound_arrival_rate: float
    """Requests per second that lately came for what is cached there, each counted as its cached share."""
    utilisation: float
    """Share of its time that it was busy with their prefill."""
    num_needed_blocks: int
    """Blocks that have to be free for it."""
    num_expected_tokens: int
    """The expected length of each of its answers."""
    held_seconds: Sequence[float] = ()
    """Own prefill time of each request of its class and tenant that waits in the router for this shard."""
    adapter_wait_seconds: float = 0.0
    """Time until the request's adapter is loaded; 0 for a request without one."""
    yielding_seconds: float = 0.0
    """The part of `queue_seconds` that it does not wait for: prefill of less urgent classes, which gives way to it."""
    held_before_seconds: float = 0.0
    """Prefill time of requests that wait in the router for this shard and go before this one whatever their length:
    those of more urgent classes, and those of other tenants whose turn comes first."""
    num_held_less_urgent: int = 0
    """The number of requests of less urgent classes that wait in the router for this shard."""
    num_beyond_parts: int = 0
    """Sequences of other tenants there, beyond as many as the request's own tenant will have with it."""
    num_urgent: int = 0
    """Sequences of more urgent classes there, waiting or running."""

    @property
    def predicted_ttft_seconds(self) -> float:
        return (
            self.queue_seconds
            - self.yielding_seconds
            + self.held_ahead_seconds
            + self.own_seconds
            + self.adapter_wait_seconds
        )

    @property
    def held_ahead_seconds(self) -> float:
        """Prefill time of the requests waiting in the router that go before this one: those of more urgent classes,
        those of other tenants whose turn comes first, and the shorter ones of its own."""
        if not self.held_seconds:
            return self.held_before_seconds
        own = self.own_seconds
        return sum(seconds for seconds in self.held_seconds if seconds <= own) + self.held_before_seconds

    @property
    def num_held_behind(self) -> int:
        if not self.held_seconds:
            return self.num_held_less_urgent
        own = self.own_seconds
        return sum(seconds > own for seconds in self.held_seconds) + self.num_held_less_urgent

    @property
    def num_new_blocks(self) -> int:
        return -(-self.num_prefill_tokens // self.block_size)


class Arrival(msgspec.Struct, frozen=True):
    """The request to be placed."""

    request_id: str
    session_key: str
    num_tokens: int
    """Tokens that need KV: the prompt, and the output of earlier attempts."""
    block_hashes: Sequence[int]
    """Hashes of the prompt's full blocks, of the first candidate's block size."""


class BacklogPolicy(msgspec.Struct, frozen=True):
    """Lets requests wait in the router while their shard has enough to do; the shortest prefill goes first.

    A shard gets more when its queued prefill is below either bound: more than the round trip takes, so that it never
    runs dry, and enough short prompts to fill one of its steps; otherwise little, so that few requests are bound to a
    place in its queue before they need be.
    """

    backlog_seconds: float
    shared_backlog_seconds: float
    """The same for a shard that also has other routers' requests: their waiting requests are not known here, so a place
    in the engine's queue is worth more."""
    backlog_tokens: int
    aging: float
    """Seconds of prefill that one second of waiting compensates."""


class CostFloor(NamedTuple):
    """A lower bound of costs, as a multiple of the request's own prefill time."""

    own: float
    waiting: float
    """For each sequence that waits there, or in the router for the shard."""
    running: float
    """For each sequence that decodes there and counts as delayed."""

    @property
    def without_others(self) -> CostFloor:
        """The bound where not all that wait or decode may count, because they are of other tenants or classes."""
        return self._replace(running=0.0)


class Policy(abc.ABC):
    """A policy: one object per router core. It is deterministic, and may remember what it placed, within a bound."""

    terms: tuple[str, ...]
    """Names of the terms of a cost."""
    hold: BacklogPolicy | None = None
    """None: placed requests are sent at once."""
    floor: CostFloor | None = None
    """The least that a shard costs, beside the wait for what is queued before the request. Shards that cannot be the
    cheapest need not be looked at. None: a cost depends on the other candidates, or no bound is known."""

    @abc.abstractmethod
    def costs(self, arrival: Arrival, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        """Return one tuple per candidate, parallel to `terms`; the lowest sum wins. In seconds, or in the policy's own
        unit."""

    def placed(self, arrival: Arrival, shard_id: str) -> None:  # noqa: B027  (most policies remember nothing)
        """The request was sent to that shard."""
