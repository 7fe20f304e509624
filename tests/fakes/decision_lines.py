"""Lines of a router's decision file, of four conversations on two shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from router.decisions.records import (
    FORMAT_VERSION,
    AttemptRecord,
    FleetLine,
    FleetShard,
    OutcomeRecord,
    RequestLine,
    ScoreRecord,
    pack_hashes,
)

BLOCK_SIZE = 16
BEGAN_AT = 1_700_000_000.0
SPEED = {"request": 0.01, "token": 1e-4, "attention_pair": 1e-9, "context_token": 2e-8}


def shard(shard_id: str, **fields: Any) -> FleetShard:
    known: dict[str, Any] = {
        "incarnation_id": "i1",
        "model": "m",
        "block_size": BLOCK_SIZE,
        "num_blocks": 1000,
        "max_batch": 8,
        "max_model_len": 4096,
        "decode_step_seconds": 0.02,
        "prefill_seconds": SPEED,
    }
    return FleetShard(shard_id=shard_id, **{**known, **fields})


def fleet(*shards: FleetShard, **fields: Any) -> FleetLine:
    known: dict[str, Any] = {"version": FORMAT_VERSION, "at": BEGAN_AT, "router_id": "r", "policy": "ect"}
    return FleetLine(**{**known, **fields}, shards=list(shards) or [shard("s0"), shard("s1")])


def request(index: int, *, in_flight: int = 0, outcome: dict[str, Any] | None = None, **fields: Any) -> RequestLine:
    """Of one of four conversations, a block longer at each turn; 0.1 s after the one before."""
    turns = [100 * (index % 4) + block for block in range(4 + index // 4)]
    served: dict[str, Any] = {
        "reason": "length",
        "error": "",
        "shard_id": f"s{index % 2}",
        "num_attempts": 1,
        "num_cached_tokens": 16 if index > 3 else 0,
        "num_output_tokens": 5,
        "queue_time_seconds": 0.0,
        "ttft_seconds": 0.03,
        "e2e_latency_seconds": 0.11,
    }
    seen = [ScoreRecord(shard_id="s0", num_running=in_flight)]
    known: dict[str, Any] = {
        "request_id": f"r{index}",
        "arrived_at": BEGAN_AT + 0.1 * index,
        "model": "m",
        "num_choices": 1,
        "num_prompt_tokens": BLOCK_SIZE * len(turns) + 3,
        "block_size": BLOCK_SIZE,
        "block_hashes": pack_hashes(turns),
        "session": f"c{index % 4}",
        "attempts": [AttemptRecord(attempt_id=1, decided_at=BEGAN_AT, picked_shard_id="s0", shards=seen)],
    }
    return RequestLine(**{**known, **fields}, outcome=OutcomeRecord(**{**served, **(outcome or {})}))


def write(path: Path, lines: Sequence[FleetLine | RequestLine]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path
