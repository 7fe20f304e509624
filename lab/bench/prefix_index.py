"""`kvloom-lab bench index`: the CPU time and memory that the router's prefix index needs on this machine."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import click
import psutil
from msgspec.structs import replace

from kvloom.v1.kv_event_pb2 import KvSnapshot
from kvloom.v1.shard_service_pb2 import ShardServiceConnectResponse
from kvloom_common.text.block_hash import block_hashes, root_hash
from lab.bench.experiment import Column, Report, TableOf, experiment
from lab.bench.prefix_index_fill import FilledIndex, chain
from lab.flags import count, flag
from router.core.prefix_index.prefix_index import PrefixIndex

BATCHES: Final = (1, 16, 512)
_BATCH_RUNS: Final = 200
_LOOK_UPS: Final = 400
_FRESH: Final = 1 << 48
"""Chains with seeds from this one on belong to no conversation."""


def run_bench(
    num_shards: int, num_blocks: int, snapshot_sizes: Sequence[int], *, num_prompt_tokens: int, block_size: int
) -> dict[str, Any]:
    """Fill an index, then measure look-ups, updates, snapshots and departures on it, one after the other.

    All times are readings of this thread's CPU clock. Other load affects them only through shared caches and through
    cores that run two threads.
    """
    gc.collect()
    rss_before = _rss_bytes()
    fleet = FilledIndex(num_shards, num_blocks, num_prompt_tokens // block_size, seed=1)
    begin = time.thread_time()
    fleet.fill()
    fill_seconds = time.thread_time() - begin
    gc.collect()
    num_bytes = _rss_bytes() - rss_before
    return {
        "num_shards": num_shards,
        "num_blocks": fleet.num_blocks,
        "prompt_blocks": fleet.prompt_blocks,
        "memory": {"bytes_per_block": round(num_bytes / fleet.num_blocks, 1), "gib": round(num_bytes / 2**30, 3)},
        "fill_us_per_block": round(1e6 * fill_seconds / fleet.num_blocks, 3),
        "hashing": _percentiles(_hashing_times(num_prompt_tokens, block_size)),
        "look_up": _look_ups(fleet),
        "update": _updates(fleet),
        "place": _placements(fleet),
        "snapshot": [_snapshot(fleet, size) for size in snapshot_sizes],
        "restart": _restart(fleet),
    }


def _look_ups(fleet: FilledIndex) -> list[dict[str, Any]]:
    """Measure the cases in which the walk is longest, each with the bits of 256 shards in use."""
    rows: list[dict[str, Any]] = []
    size = fleet.prompt_blocks
    look_up = fleet.index.count_overlaps
    numbers = random.Random(2).sample(range(fleet.num_conversations), min(_LOOK_UPS, fleet.num_conversations))

    def measure(case: str, prompts: Iterable[list[int]]) -> None:
        rows.append({"case": case, **_percentiles(_time(look_up, ((prompt, 0.0) for prompt in prompts)))})

    measure("one shard holds a conversation, not looked up before", map(fleet.conversation, numbers))
    measure("the same one again and again", itertools.repeat(fleet.conversation(numbers[0]), _LOOK_UPS))
    measure("nothing matches", (chain(_FRESH + number, size) for number in range(_LOOK_UPS)))
    system = chain(_FRESH - 1, size // 2)
    for shard_id in fleet.shard_ids:
        fleet.store(shard_id, system)
    measure("all shards hold the first half", ([*system, *chain(_FRESH + n, size // 2)] for n in range(_LOOK_UPS)))
    shared = chain(_FRESH - 2, size)
    for number, shard_id in enumerate(fleet.shard_ids, 1):
        fleet.store(shard_id, shared[: max(1, size * number // len(fleet.shard_ids))])
    measure("every shard holds another depth", itertools.repeat(shared, _LOOK_UPS))
    evicted = chain(_FRESH - 3, size)
    for number, shard_id in enumerate(fleet.shard_ids, 1):
        fleet.store(shard_id, evicted)
        tail = evicted[max(1, size * number // len(fleet.shard_ids)) :]
        for block_hash in reversed(tail):
            fleet.remove(shard_id, (block_hash,))
    measure("the same, after evictions block by block", itertools.repeat(evicted, _LOOK_UPS))
    scattered = [chain(_FRESH - 4 - number, size) for number in range(100)]
    mixed_up = list(itertools.chain.from_iterable(scattered))
    random.Random(3).shuffle(mixed_up)
    fleet.add_shard("scattered", mixed_up)
    _settling_times(fleet.index)
    measure("from a snapshot in random order", scattered)
    for prompt in scattered:
        fleet.index.place("scattered", prompt, 0.0)
    measure("the same, once placed", scattered)
    fleet.index.remove_shard("scattered")
    _settling_times(fleet.index)
    return rows


def _updates(fleet: FilledIndex) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    seeds = itertools.count(2 * _FRESH)
    shard_id = fleet.shard_ids[0]
    for batch in BATCHES:
        batches = [chain(next(seeds), batch) for _ in range(_BATCH_RUNS)]
        stored = _time(fleet.store, ((shard_id, hashes) for hashes in batches))
        # As an engine evicts: the oldest sequence first, and its last block first.
        removed = _time(fleet.remove, ((shard_id, hashes[::-1]) for hashes in batches))
        for operation, times in (("store", stored), ("remove", removed)):
            rows.append({"operation": operation, "batch": batch, **_percentiles(times, per=batch)})
    return rows


def _placements(fleet: FilledIndex) -> list[dict[str, Any]]:
    size = fleet.prompt_blocks
    numbers = random.Random(4).sample(range(fleet.num_conversations), min(_BATCH_RUNS, fleet.num_conversations))
    shard_ids = [fleet.shard_ids[number % len(fleet.shard_ids)] for number in numbers]
    known = [fleet.conversation(number) for number in numbers]
    half = [[*hashes[: size // 2], *chain(3 * _FRESH + n, size // 2)] for n, hashes in enumerate(known)]
    new = [chain(4 * _FRESH + n, size) for n in range(len(known))]
    rows: list[dict[str, Any]] = []
    cases = (
        ("all known, generated blocks gathered", known),
        ("all known", known),
        ("half new", half),
        ("all new", new),
    )
    for case, prompts in cases:
        for prompt in prompts:  # the look-up that precedes a placement
            fleet.index.count_overlaps(prompt, 0.0)
        times = _time(fleet.index.place, ((i, prompt, 0.0) for i, prompt in zip(shard_ids, prompts, strict=True)))
        rows.append({"case": case, **_percentiles(times)})
    return rows


def _snapshot(fleet: FilledIndex, num_blocks: int) -> dict[str, Any]:
    """Measure a snapshot of a new shard, then the shard's departure, each with the work that is deferred to later
    steps."""
    index = fleet.index
    hashes = chain(5 * _FRESH + num_blocks, num_blocks)
    index.add_shard("new", num_blocks, 0.0)
    snapshot = [*_time(index.apply_snapshot, [("new", 0, hashes)]), *_settling_times(index)]
    removal = [*_time(index.remove_shard, [("new",)]), *_settling_times(index)]
    row: dict[str, Any] = {"blocks": num_blocks}
    for name, times in (("snapshot", snapshot), ("removal", removal)):
        row[f"{name}_total_ms"] = round(sum(times) / 1e6, 2)
        row[f"{name}_at_once_ms"] = round(times[0] / 1e6, 2)
        row[f"{name}_longest_later_step_ms"] = round(max(times[1:], default=0) / 1e6, 2)
    return row


def _restart(fleet: FilledIndex) -> dict[str, float]:
    """Measure how a router that has started anew learns what all shards hold, from their frames on: the snapshots of
    all, and the work that is deferred to later events. The index of the fleet is given up before that."""
    num_shards = len(fleet.shard_ids)
    fleet.index = index = PrefixIndex()
    gc.collect()
    times: list[int] = []

    def read(shard_id: str, frame: bytes) -> None:
        snapshot = ShardServiceConnectResponse.FromString(frame).kv_snapshot
        index.apply_snapshot(shard_id, snapshot.number, snapshot.block_hashes[:])

    for number, shard_id in enumerate(fleet.shard_ids):
        index.add_shard(shard_id, 2 * fleet.num_blocks, 0.0)
        held = map(fleet.conversation, range(number, fleet.num_conversations, num_shards))
        snapshot = KvSnapshot(number=1, block_hashes=itertools.chain.from_iterable(held))
        times += _time(read, [(shard_id, ShardServiceConnectResponse(kv_snapshot=snapshot).SerializeToString())])
    later = _settling_times(index)
    return {
        "blocks": index.num_blocks,
        "seconds": round(sum(times + later) / 1e9, 2),
        "num_later_steps": len(later),
        "longest_ms": round(max(times + later) / 1e6, 2),
    }


def _settling_times(index: PrefixIndex) -> list[int]:
    times: list[int] = []
    while not index.is_settled:
        times += _time(index.settle, [()])
    return times


def _hashing_times(num_prompt_tokens: int, block_size: int) -> list[int]:
    draw = random.Random(5)
    tokens = [draw.randrange(100_000) for _ in range(num_prompt_tokens)]
    root = root_hash("model")
    return _time(block_hashes, itertools.repeat((tokens, block_size, root), _LOOK_UPS))


def _time(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> list[int]:
    """Return the CPU-nanoseconds of each call. The arguments are prepared outside of the measurement."""
    clock = time.thread_time_ns
    times: list[int] = []
    for arguments in calls:
        begin = clock()
        function(*arguments)
        times.append(clock() - begin)
    return times


def _percentiles(times: list[int], per: int = 1) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "p50_us": round(ordered[len(ordered) // 2] / 1e3 / per, 3),
        "p99_us": round(ordered[len(ordered) * 99 // 100] / 1e3 / per, 3),
    }


def _rss_bytes() -> int:
    # For an index that is much smaller than the rest of the process, the growth says little and may even be negative:
    # memory that was free before is used first.
    return psutil.Process().memory_info().rss


_TIMES: Final = (
    Column("CPU-µs a prompt", "what", is_left=True),
    Column("p50", "p50_us", ".2f"),
    Column("p99", "p99_us", ".2f"),
)
_STEPS: Final = (
    Column("CPU-ms of a shard's", "what", is_left=True),
    Column("total", "total", ".2f"),
    Column("at once", "at_once", ".2f"),
    Column("longest later step", "longest", ".2f"),
)


@experiment(
    "index",
    count("--shards", 256, "Shards that share it.", most=4096, to="num_shards"),
    count(
        "--blocks",
        1_000_000,
        "Held in all; 10000000 takes about a minute.",
        least=100_000,
        most=50_000_000,
        to="num_blocks",
    ),
    count(
        "--prompt-tokens", 8192, "The length of a looked-up prompt.", least=256, most=131_072, to="num_prompt_tokens"
    ),
    count("--block-size", 16, "Tokens in a block.", most=128),
    flag(
        "--snapshot-blocks",
        click.IntRange(1, 2_000_000),
        (20_000, 100_000, 1_000_000),
        "Size of a snapshot; may be repeated.",
        to="snapshot_sizes",
        multiple=True,
    ),
)
def bench_index(
    num_shards: int, num_blocks: int, num_prompt_tokens: int, block_size: int, snapshot_sizes: Sequence[int]
) -> Report:
    """Measure the router's prefix index: look-ups, updates, snapshots and memory, in CPU time of one thread."""
    if not 16 <= num_prompt_tokens // block_size <= num_blocks // 100:
        raise click.UsageError("The prompt must have at least 16 blocks, and at most a hundredth of all blocks.")
    report = run_bench(
        num_shards, num_blocks, snapshot_sizes, num_prompt_tokens=num_prompt_tokens, block_size=block_size
    )
    memory = report["memory"]
    prompts = [
        {"what": "hashing it", **report["hashing"]},
        *({"what": f"{name}: {row['case']}", **row} for name in ("look_up", "place") for row in report[name]),
    ]
    updates = [{"what": f"{row['operation']}, {row['batch']} in a batch", **row} for row in report["update"]]
    steps = [
        {
            "what": f"{name} with {row['blocks']:,} blocks",
            "total": row[f"{name}_total_ms"],
            "at_once": row[f"{name}_at_once_ms"],
            "longest": row[f"{name}_longest_later_step_ms"],
        }
        for row in report["snapshot"]
        for name in ("snapshot", "removal")
    ]
    restart = report["restart"]
    about = (
        f"{report['num_blocks']:,} blocks on {report['num_shards']} shards, prompts of {report['prompt_blocks']}\n"
        f"memory   {memory['bytes_per_block']:.1f} bytes a block, {memory['gib']:.2f} GiB\n"
        f"fill     {report['fill_us_per_block']:.2f} us a block, hashing of the test's own included\n"
        f"restart  {restart['seconds']:.2f} CPU-s until all {restart['blocks']:,} blocks of the shards' snapshots are "
        f"known again, with {restart['num_later_steps']:,} later events; the longest step takes "
        f"{restart['longest_ms']:.1f} ms"
    )
    per_block = (replace(_TIMES[0], heading="CPU-µs a block"), *_TIMES[1:])
    return Report(report, [about, TableOf(_TIMES, prompts), TableOf(per_block, updates), TableOf(_STEPS, steps)])
