"""The journal makes the decision log's lines: one per ended request, and one for the fleet whenever it has changed."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import msgspec

from kvloom.errors import reason_name
from kvloom_common.finish_reasons import FINISH_REASON_NAMES
from router.caller_scope import shown_id
from router.core.actions import PlacementDecided, RequestEnded
from router.core.events import TierRank
from router.core.fleet.fleet import ShardState
from router.decisions.records import (
    FORMAT_VERSION,
    AttemptRecord,
    FleetLine,
    FleetShard,
    JudgedRecord,
    OutcomeRecord,
    RequestLine,
    pack_hashes,
)

FLEET_CHECK_SECONDS: Final = 10.0
"""How often the shards' speeds are compared with the fleet line that was written last."""
SPEED_TOLERANCE: Final = 0.2
"""Measured speeds vary all the time, so a relative change of less than this is ignored."""
SALT_BYTES: Final = 32

_encode: Final = msgspec.json.Encoder().encode
_NO_OUTCOME: Final = OutcomeRecord(
    reason="",
    error="",
    shard_id="",
    num_attempts=0,
    num_cached_tokens=0,
    num_output_tokens=0,
    queue_time_seconds=0.0,
    ttft_seconds=None,
    e2e_latency_seconds=0.0,
)


class LineSink(Protocol):
    """Receives the lines to be written."""

    def put(self, header: bytes, line: bytes) -> bool:
        """Takes a line and a new header, or b"". Returns False when both were dropped."""
        ...


class DecisionJournal:
    """Makes the lines: each is begun when its request is first placed, and finished when the request ends."""

    def __init__(
        self,
        sink: LineSink,
        on_dropped: Callable[[int], None],
        shards: Callable[[], Sequence[ShardState]],
        *,
        policy: str,
        router_id: str,
        names_tenants: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_dropped` is called with the number of lines that were dropped because their requests were forgotten
        before they ended; lines that the sink drops are not included. With `names_tenants`, lines have the names of
        tenants and the ids of keys, not hashes. `clock` returns Unix seconds."""
        self._sink = sink
        self._on_dropped = on_dropped
        self._shards = shards
        self._policy = policy
        self._router_id = router_id
        self._names_tenants = names_tenants
        self._clock = clock
        self._written_fleet: FleetLine | None = None
        self._next_check_at = 0.0
        self._salt = secrets.token_bytes(SALT_BYTES)

    def begin_line(self, decision: PlacementDecided, decided_at: float) -> RequestLine:
        """Returns a line with everything known about a request when it is first placed. It holds no prompt text."""
        request = decision.request
        return RequestLine(
            request_id=shown_id(request.request_id, request.tenant),
            arrived_at=decided_at,
            model=request.model,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_choices=len(request.choices),
            outcome=_NO_OUTCOME,
            block_size=decision.block_size,
            block_hashes=pack_hashes(decision.block_hashes),
            max_tokens=request.max_tokens,
            tenant=self._named(request.tenant),
            key=self._named(request.key_id),
            is_batch=request.tier is TierRank.BATCH,
            session=self._hashed(request.session_key),
        )

    def write_refused(self, ended: RequestEnded) -> None:
        """Write the line of a request that ended with an error before it was placed."""
        usage = ended.usage
        self._put(
            RequestLine(
                request_id=shown_id(ended.request_id, ended.tenant),
                arrived_at=self._clock() - ended.e2e_latency_seconds,
                model=ended.model,
                num_prompt_tokens=ended.num_prompt_tokens,
                num_choices=ended.num_choices,
                outcome=_outcome(ended),
                max_tokens=ended.max_tokens,
                tenant=self._named(ended.tenant),
                key="" if usage is None else self._named(usage.key_id),
                is_batch=usage is not None and usage.tier is TierRank.BATCH,
            )
        )

    def end_line(self, line: RequestLine, ended: RequestEnded, attempts: list[AttemptRecord]) -> None:
        line.arrived_at -= ended.queue_time_seconds
        line.outcome = _outcome(ended)
        line.attempts = attempts
        self._put(line)

    def _put(self, line: RequestLine) -> None:
        fleet = self._changed_fleet()
        header = b"" if fleet is None else _encode(fleet) + b"\n"
        if self._sink.put(header, _encode(line) + b"\n") and fleet is not None:
            self._written_fleet = fleet

    def drop_line(self) -> None:
        """Called when a request was forgotten before it ended."""
        self._on_dropped(1)

    def fleet_changed(self) -> None:
        """Makes the next line check the fleet for changes."""
        self._next_check_at = 0.0

    def _changed_fleet(self) -> FleetLine | None:
        """Returns None when the fleet line that was written last still holds, or when no check is due."""
        now = self._clock()
        if now < self._next_check_at and self._written_fleet is not None:
            return None
        self._next_check_at = now + FLEET_CHECK_SECONDS
        fleet = _fleet_line(self._shards(), self._policy, self._router_id, now)
        return None if self._written_fleet is not None and _is_alike(self._written_fleet, fleet) else fleet

    def _named(self, name: str) -> str:
        return name if self._names_tenants else self._hashed(name)

    def _hashed(self, name: str) -> str:
        """Returns a hash that distinguishes names within one process's lines, or "" for no name."""
        return hashlib.blake2b(name.encode(), key=self._salt, digest_size=8).hexdigest() if name else ""


def _outcome(ended: RequestEnded) -> OutcomeRecord:
    return OutcomeRecord(
        reason=FINISH_REASON_NAMES[ended.reason],
        error=reason_name(ended.error_reason).lower() if ended.error_reason else "",
        shard_id=ended.shard_id,
        num_attempts=ended.num_attempts,
        num_cached_tokens=ended.num_cached_tokens,
        num_output_tokens=ended.num_output_tokens,
        queue_time_seconds=ended.queue_time_seconds,
        ttft_seconds=ended.ttft_seconds,
        e2e_latency_seconds=ended.e2e_latency_seconds,
        predictions=[
            JudgedRecord(term=term.value, predicted_seconds=predicted, actual_seconds=actual)
            for term, predicted, actual in ended.judged_prediction
        ],
    )


def _fleet_line(shards: Iterable[ShardState], policy: str, router_id: str, at: float) -> FleetLine:
    """`at` is in Unix seconds."""
    known = sorted((_fleet_shard(state) for state in shards), key=lambda shard: shard.shard_id)
    return FleetLine(version=FORMAT_VERSION, at=at, router_id=router_id, policy=policy, shards=known)


def _is_alike(one: FleetLine, other: FleetLine) -> bool:
    """True when both have the same shards, with speeds that differ by less than SPEED_TOLERANCE."""
    return len(one.shards) == len(other.shards) and all(map(_are_alike, one.shards, other.shards))


def _fleet_shard(state: ShardState) -> FleetShard:
    description = state.description
    return FleetShard(
        shard_id=description.shard_id,
        incarnation_id=description.incarnation_id,
        model=description.model,
        block_size=description.block_size,
        num_blocks=description.num_blocks,
        max_batch=description.max_batch,
        max_model_len=description.max_model_len,
        draining=state.is_draining,
        prefill_tokens_per_second=state.prefill_tokens_per_second,
        decode_step_seconds=state.decode_step_seconds,
        prefill_seconds=dict(state.prefill_seconds),
    )


def _are_alike(one: FleetShard, other: FleetShard) -> bool:
    return (
        (one.shard_id, one.incarnation_id, one.draining) == (other.shard_id, other.incarnation_id, other.draining)
        and _is_close(one.prefill_tokens_per_second, other.prefill_tokens_per_second)
        and _is_close(one.decode_step_seconds, other.decode_step_seconds)
        and one.prefill_seconds.keys() == other.prefill_seconds.keys()
        and all(_is_close(value, other.prefill_seconds[name]) for name, value in one.prefill_seconds.items())
    )


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SPEED_TOLERANCE)
