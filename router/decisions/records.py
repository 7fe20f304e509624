"""The lines of the decision log's file. docs/how-to/routing-decisions.md describes the format.

Every line is a JSON object, either a fleet line or a request line, as its `type` states. Times are in Unix seconds and
durations in seconds. Fields with default values are left out, and readers ignore fields that they do not know.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from router.core.placement.plan import ShardPlan

FORMAT_VERSION: Final = 2


class FleetShard(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A shard and its speed at the time of the line."""

    shard_id: str
    incarnation_id: str
    model: str
    block_size: int
    num_blocks: int
    max_batch: int
    max_model_len: int
    draining: bool = False
    prefill_tokens_per_second: float = 0.0
    """The speed that the shard measured, or 0 if it is not known yet."""
    decode_step_seconds: float = 0.0
    """The duration that the shard measured, or 0 if it is not known yet."""
    prefill_seconds: dict[str, float] = {}
    """The coefficients that the router has learned, see router/core/load/speed_model.py."""


class FleetLine(msgspec.Struct, tag="fleet", kw_only=True):
    """The state of the fleet for the request lines that follow, until the next fleet line."""

    version: int
    at: float
    router_id: str
    policy: str
    shards: list[FleetShard]


class ScoreRecord(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """ShardScore of router_service.proto. Numbers that are not finite are null."""

    shard_id: str
    num_overlap_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_queued_prefill_tokens: int = 0
    predicted_ttft_seconds: float | None = 0.0
    cost_seconds: float | None = 0.0
    cost_terms: dict[str, float | None] = {}
    filtered_reason: str = ""

    def to_plan(self) -> ShardPlan:
        infinite = float("inf")
        return ShardPlan(
            shard_id=self.shard_id,
            num_overlap_tokens=self.num_overlap_tokens,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_queued_prefill_tokens=self.num_queued_prefill_tokens,
            predicted_ttft_seconds=infinite if self.predicted_ttft_seconds is None else self.predicted_ttft_seconds,
            cost_seconds=infinite if self.cost_seconds is None else self.cost_seconds,
            cost_terms={name: infinite if value is None else value for name, value in self.cost_terms.items()},
            filtered_reason=self.filtered_reason,
        )


class AttemptRecord(msgspec.Struct, kw_only=True):
    """One placement, with every shard as it was then; the picked one comes first."""

    attempt_id: int
    decided_at: float
    picked_shard_id: str
    shards: list[ScoreRecord]


class JudgedRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """JudgedTerm of router_service.proto. Numbers that are not finite are null."""

    term: str
    predicted_seconds: float | None
    actual_seconds: float | None = None


class OutcomeRecord(msgspec.Struct, kw_only=True):
    reason: str
    """"stop", "length", "content_filter", "cancelled", "error"."""
    error: str
    """A name of error_reason.proto in lower case, e.g. "shard_lost", or ""."""
    shard_id: str
    """The shard on which the request ended."""
    num_attempts: int
    num_cached_tokens: int
    """Cached tokens of the prompt, as the engine counted them for the first choice."""
    num_output_tokens: int
    """Output tokens of all choices."""
    queue_time_seconds: float
    """From arrival to the first dispatch."""
    ttft_seconds: float | None
    """From arrival to the first token sent to the client, or null if none was sent."""
    e2e_latency_seconds: float
    predictions: list[JudgedRecord] = []
    """The predictions made when it was first placed, with what happened. Earlier routers did not write it."""


class RequestLine(msgspec.Struct, tag="request", kw_only=True, omit_defaults=True):
    """A request that was placed and has ended, or one that was refused: it has no attempts and no block hashes."""

    request_id: str
    arrived_at: float
    model: str
    num_prompt_tokens: int
    num_choices: int
    outcome: OutcomeRecord
    block_size: int = 0
    """The block size of the shard that was picked first."""
    block_hashes: bytes = b""
    """The hashes of the prompt's full blocks; in JSON, base64 of little-endian 64-bit integers."""
    attempts: list[AttemptRecord] = []
    max_tokens: int | None = None
    """The request's limit per choice. Without one, as many as fit the context window."""
    tenant: str = ""
    """A hash, salted per router process, or the name with `router.decision_log.named`; "" if there is no tenant."""
    key: str = ""
    """The id of its key is hashed or not in the same way."""
    is_batch: bool = False
    """True when it is in the batch tier, which has a price of its own."""
    session: str = ""
    """A hash, salted per router process, or "" if there is no session key."""

    def hashes(self) -> array[int]:
        return unpack_hashes(self.block_hashes)


def pack_hashes(block_hashes: Sequence[int]) -> bytes:
    packed = array("Q", block_hashes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(packed: bytes) -> array[int]:
    hashes = array("Q", packed)
    if sys.byteorder == "big":
        hashes.byteswap()
    return hashes


_DECODER: Final = msgspec.json.Decoder(FleetLine | RequestLine)


def read_decisions(lines: Iterable[bytes]) -> Iterator[FleetLine | RequestLine]:
    """Decodes the lines of a decision file (e.g. the open file). A line that was truncated when its router was
    killed is skipped.

    Raises ValueError, with the number of the line, for a line that is JSON but not of this format.
    """
    for number, line in enumerate(lines, start=1):
        try:
            yield _DECODER.decode(line)
        except msgspec.ValidationError as error:
            raise ValueError(f"line {number}: {error}") from error
        except msgspec.DecodeError:
            continue
