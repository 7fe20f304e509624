"""The decision log's file, line by line: requests as they end, and the fleet whenever it has changed."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from kvloom.errors import reason_name
from kvloom.v1.generation_pb2 import FinishReason
from router.core.actions import PlacementDecided, RequestEnded
from router.core.fleet.shard_state import ShardState
from router.decisions.fleet import fleet_line, is_alike
from router.decisions.records import AttemptRecord, FleetLine, OutcomeRecord, RequestLine, pack_hashes

FLEET_LOOK_SECONDS: Final = 10.0
"""How often the shards' speeds are compared with what the file was last told."""
SALT_BYTES: Final = 32

_encode: Final = msgspec.json.Encoder().encode
_OPEN: Final = OutcomeRecord(
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
    """Takes a line to be written, and with it a new header if there is one. False: both were dropped."""

    def put(self, header: bytes, line: bytes) -> bool: ...


class DecisionJournal:
    """Makes the lines: each is begun when its request is placed, and ended with it."""

    def __init__(
        self,
        sink: LineSink,
        on_dropped: Callable[[int], None],
        shards: Callable[[], Sequence[ShardState]],
        *,
        policy: str,
        router_id: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_dropped` hears of requests that were forgotten before they ended; of what the sink drops the sink tells
        itself. `clock`: Unix seconds."""
        self._sink = sink
        self._on_dropped = on_dropped
        self._shards = shards
        self._policy = policy
        self._router_id = router_id
        self._clock = clock
        self._told: FleetLine | None = None
        self._next_look_at = 0.0
        self._salt = secrets.token_bytes(SALT_BYTES)

    def begin_line(self, decision: PlacementDecided, decided_at: float) -> RequestLine:
        """What is known of a request when it is placed first. Holds no prompt, and names only as hashes."""
        request = decision.request
        return RequestLine(
            request_id=request.request_id,
            arrived_at=decided_at,
            model=request.model,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_choices=len(request.choices),
            block_size=decision.block_size,
            block_hashes=pack_hashes(decision.block_hashes),
            attempts=[],
            outcome=_OPEN,
            max_tokens=request.max_tokens,
            tenant=self._hashed(request.tenant),
            session=self._hashed(request.session_key),
        )

    def end_line(self, line: RequestLine, ended: RequestEnded, attempts: list[AttemptRecord]) -> None:
        line.arrived_at -= ended.queue_time_seconds
        line.outcome = _outcome(ended)
        line.attempts = attempts
        fleet = self._news_of_fleet()
        header = b"" if fleet is None else _encode(fleet) + b"\n"
        if self._sink.put(header, _encode(line) + b"\n") and fleet is not None:
            self._told = fleet

    def give_up_line(self) -> None:
        """A request was forgotten before it ended."""
        self._on_dropped(1)

    def fleet_changed(self) -> None:
        """The next line comes behind a look at the fleet."""
        self._next_look_at = 0.0

    def _news_of_fleet(self) -> FleetLine | None:
        """None when the file knows it already, or when it is not time to look."""
        now = self._clock()
        if now < self._next_look_at and self._told is not None:
            return None
        self._next_look_at = now + FLEET_LOOK_SECONDS
        fleet = fleet_line(self._shards(), self._policy, self._router_id, now)
        return None if self._told is not None and is_alike(self._told, fleet) else fleet

    def _hashed(self, name: str) -> str:
        """Tells names apart, within one process's lines."""
        return hashlib.blake2b(name.encode(), key=self._salt, digest_size=8).hexdigest() if name else ""


def _outcome(ended: RequestEnded) -> OutcomeRecord:
    return OutcomeRecord(
        reason=FinishReason.Name(ended.reason).removeprefix("FINISH_REASON_").lower(),
        error=reason_name(ended.error_reason).lower() if ended.error_reason else "",
        shard_id=ended.shard_id,
        num_attempts=ended.num_attempts,
        num_cached_tokens=ended.num_cached_tokens,
        num_output_tokens=ended.num_output_tokens,
        queue_time_seconds=ended.queue_time_seconds,
        ttft_seconds=ended.ttft_seconds,
        e2e_latency_seconds=ended.e2e_latency_seconds,
    )
