"""Mooncake's traces (github.com/kvcache-ai/Mooncake, FAST25-release): JSON lines with ids of
prefix blocks of 512 tokens. A line may name its `model`, which the published ones do not.

Timestamps are milliseconds, quantised to ticks of about 3 s. A call arrives at a random time within its tick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from tools.failures import CommandError
from tools.simulate.traces.open_loop import OpenTrace, tick_of
from tools.simulate.traces.reading import (
    MAX_CALLS,
    BlockId,
    PromptTokenCount,
    ReadFraction,
    TokenCount,
    line_error,
    read_records,
)
from tools.simulate.traces.trace import hash_base
from tools.simulate.workload import Call

BLOCK_SIZE: Final = 512
_MASK: Final = (1 << 63) - 1


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: PromptTokenCount
    output_length: TokenCount
    hash_ids: list[BlockId]
    model: str = ""


def read_mooncake(path: Path, on_fraction: ReadFraction | None = None, block_size: int = BLOCK_SIZE) -> OpenTrace:
    """Raises CommandError. A partly filled last block cannot be reused and gets no hash. Full blocks after the last id
    get unique hashes."""
    base = hash_base("mooncake")
    calls: list[Call] = []
    timestamps: list[float] = []
    for line_number, line in read_records(path, _Line, on_fraction):
        call_id = len(calls)
        if call_id >= MAX_CALLS:
            raise line_error(path, line_number, "", f"more than {MAX_CALLS} calls")
        num_full_blocks, rest = divmod(line.input_length, block_size)
        if len(line.hash_ids) > num_full_blocks + (rest > 0):
            raise line_error(
                path,
                line_number,
                "hash_ids",
                f"{len(line.hash_ids)} blocks of {block_size} tokens for a prompt of {line.input_length} tokens",
            )
        hashes = [_spread(base + block_id) for block_id in line.hash_ids[:num_full_blocks]]
        own_base = hash_base("mooncake", call_id)
        hashes += range(own_base + len(hashes), own_base + num_full_blocks)
        calls.append(Call(call_id, line.input_length, max(1, line.output_length), tuple(hashes), model=line.model))
        timestamps.append(line.timestamp / 1e3)
    if not calls:
        raise CommandError(f"{path}: no calls in it")
    first = min(timestamps)
    timestamps = [timestamp - first for timestamp in timestamps]
    return OpenTrace(calls, timestamps, tick_of(timestamps), block_size)


def _spread(number: int) -> int:
    """Fibonacci hashing: one-to-one, and neighbours are far apart."""
    return (number * 0x9E3779B97F4A7C15) & _MASK
