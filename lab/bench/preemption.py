"""`kvloom-lab bench preemption`: urgent requests on shards that batch answers fill, with preemption, without it, and on
the idle fabric."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from kvloom.v1.router_service_pb2 import ExplainResponse
from kvloom_common.config import KvloomConfig, PriorityClassConfig
from lab.bench.bench_fabric import SHARD_FLAGS, BenchFabric, Device, bench_config, bench_fabric
from lab.bench.disturbed import num_differing_bytes, num_tokens_computed_again
from lab.bench.experiment import Column, Report, TableOf, choice, count, experiment, show_progress
from tools.bench.streams import MeasuredStream, numbered_prompt, play, play_one
from tools.failures import CommandError
from tools.simulate.plot import draw
from tools.simulate.runs import Curves
from tools.simulate.statistics import quantile

URGENT: Final = "urgent"
IDLE: Final = "idle fabric"
WITH: Final = "preemption"
WITHOUT: Final = "no preemption"
_BATCH: Final = "batch"
_ARRIVAL_SHARES: Final = (0.1, 0.6)
"""Urgent requests arrive while the batch has between these shares of its text, at equal distances: then its answers
fill all places, on any machine."""
_POLL_SECONDS: Final = 0.01
_COLUMNS: Final = (
    Column("", "run"),
    Column("TTFT of urgent requests, p50", "ttft_p50", ".2f", " s"),
    Column("p99", "ttft_p99", ".2f", " s"),
    Column("the batch took", "batch_seconds", ".2f", " s"),
    Column("batch answers preempted", "num_preempted"),
    Column("preemptions", "num_preemptions"),
    Column("tokens computed again", "num_tokens_computed_again"),
    Column("errors", "num_errors"),
    Column("differing batch answers", "num_differing_answers"),
)


class PreemptionPlan(msgspec.Struct, frozen=True):
    """Says what the clients send."""

    num_batch: int
    num_prompt_words: int
    max_tokens: int
    """The tokens of the longest batch answer; the shortest has half as many, so that they do not end at the same
    time."""
    num_urgent: int
    max_urgent_tokens: int


class PreemptionRow(msgspec.Struct, frozen=True):
    """One run. Times in seconds; those of urgent requests are of those that had a first token."""

    run: str
    ttft_p50: float | None
    ttft_p99: float | None
    num_preempted: int
    """Batch answers that were preempted at least once."""
    num_preemptions: int
    num_tokens_computed_again: int
    num_errors: int
    """The errors of batch and urgent requests together."""
    num_differing_answers: int
    """Batch answers whose text is not that of the run in which nothing disturbed them."""
    batch_seconds: float
    """From the first batch request to the end of the last batch answer. With the idle fabric it is that of the batch by
    itself."""


class PreemptionReport(msgspec.Struct, frozen=True):
    engine: str
    num_shards: int
    max_batch: int
    plan: PreemptionPlan
    rows: list[PreemptionRow]

    @property
    def is_clean(self) -> bool:
        return not any(row.num_errors or row.num_differing_answers for row in self.rows)


@experiment(
    "preemption",
    choice("--engine", ["torch", "sim"], "torch", "The engine of the shards."),
    count("--shards", 2, most=16, to="num_shards"),
    count("--max-batch", 4, "Answers that run on a shard at the same time.", most=256),
    count("--batch-answers", 16, "Batch requests, all sent at once.", least=2, most=1024, to="num_batch"),
    count("--prompt-words", 40, most=1000, to="num_prompt_words"),
    count(
        "--max-tokens",
        160,
        "Output tokens of the longest batch answer; the shortest has half as many.",
        least=2,
        most=4000,
    ),
    count(
        "--urgent",
        20,
        "Urgent requests, sent while the batch has between 10% and 60% of its text.",
        most=1024,
        to="num_urgent",
    ),
    count("--urgent-tokens", 8, "Output tokens of each urgent answer.", most=4000, to="max_urgent_tokens"),
    *SHARD_FLAGS,
    plot="the distributions of the urgent TTFT",
)
def bench_preemption(
    engine: str, model: str, device: Device, num_shards: int, max_batch: int, data_dir: Path | None, **sizes: Any
) -> Report:
    """Send urgent requests to shards that batch answers fill, with preemption and without it, and to the idle fabric.
    Compares every batch answer with that of the same request in an undisturbed run. Exits with 1 if one failed or
    differs."""
    config = bench_config(engine, model, device, data_dir, num_shards=num_shards, max_batch=max_batch)
    curves: dict[str, Curves] = {}
    found = asyncio.run(run(config, PreemptionPlan(**sizes), curves, show_progress))
    table = TableOf(
        _COLUMNS,
        found.rows,
        f"{found.plan.num_urgent} urgent requests, {found.plan.num_batch} batch answers, {found.num_shards} "
        f"{found.engine} shards of {found.max_batch} places",
        is_turned=True,
    )
    title = f"TTFT of urgent requests, {num_shards} x {engine}, {max_batch} places each"
    return Report(found, [table], lambda path: draw(path, curves, title), is_right=found.is_clean)


async def run(
    config: KvloomConfig,
    plan: PreemptionPlan,
    curves: dict[str, Curves],
    on_progress: Callable[[str], None],
) -> PreemptionReport:
    """Start two fabrics, one after the other. `curves` gets the TTFT of each run, in the order of the rows. Raises
    CommandError."""
    config.router.classes = [PriorityClassConfig(name=URGENT, rank=0)]
    on_progress("a fabric with preemption: the batch by itself, urgent requests by themselves, and both")
    async with bench_fabric(config) as fabric:
        alone = _batch(plan, "alone")
        await play(fabric.session, fabric.model, alone)
        on_idle = _urgent(plan, "idle")
        for stream in on_idle:
            await play_one(fabric.session, fabric.model, stream)
        disturbed, urgent = _batch(plan, "with"), _urgent(plan, "with")
        await _play_both(fabric, disturbed, urgent, alone)
        rows = [
            row_of(IDLE, on_idle, alone, alone, {}),
            row_of(WITH, urgent, disturbed, alone, await fabric.explain(disturbed)),
        ]
    on_progress("a fabric without preemption: both")
    config.router.fairness.enabled = False
    async with bench_fabric(config) as fabric:
        # As on the first fabric, the prompts of the batch are cached, and the first tokens of each shard are known.
        warm_up = [msgspec.structs.replace(stream, max_tokens=1) for stream in _batch(plan, "warm-up")]
        await play(fabric.session, fabric.model, warm_up)
        waited, waiting = _batch(plan, "without"), _urgent(plan, "without")
        await _play_both(fabric, waited, waiting, alone)
        rows.append(row_of(WITHOUT, waiting, waited, alone, await fabric.explain(waited)))
    for name, streams in ((IDLE, on_idle), (WITH, urgent), (WITHOUT, waiting)):
        curves[name] = Curves(_ttfts(streams), [])
    return PreemptionReport(config.shard.engine, config.shard.num_started, config.shard.max_batch, plan, rows)


def _batch(plan: PreemptionPlan, run_name: str) -> list[MeasuredStream]:
    """The same requests in every run, but for their names."""
    return [
        MeasuredStream(
            f"{run_name}-batch-{number}",
            batch_length(number, plan),
            numbered_prompt(number, plan.num_prompt_words),
            seed=number,
            priority_class=_BATCH,
        )
        for number in range(plan.num_batch)
    ]


def batch_length(number: int, plan: PreemptionPlan) -> int:
    """From half of the most tokens to all of them, rising with the number."""
    least = max(1, plan.max_tokens // 2)
    return least + (plan.max_tokens - least) * number // max(1, plan.num_batch - 1)


def _urgent(plan: PreemptionPlan, run_name: str) -> list[MeasuredStream]:
    """The prompts of each run are new, so that none is cached."""
    return [
        MeasuredStream(
            f"{run_name}-urgent-{number}",
            plan.max_urgent_tokens,
            numbered_prompt(number, plan.num_prompt_words, title=f"Urgent {run_name}"),
            seed=number,
            priority_class=URGENT,
        )
        for number in range(plan.num_urgent)
    ]


async def _play_both(
    fabric: BenchFabric,
    batch: Sequence[MeasuredStream],
    urgent: Sequence[MeasuredStream],
    alone: Sequence[MeasuredStream],
) -> None:
    """Send each urgent request when the batch has its share of the text that it had alone."""
    num_pieces = sum(len(stream.pieces_at) for stream in alone)
    batch_playing = asyncio.create_task(play(fabric.session, fabric.model, batch), name="batch")
    urgent_playing: list[asyncio.Task[None]] = []
    try:
        for stream, share in zip(urgent, arrival_shares(len(urgent)), strict=True):
            await _until_begun(batch, share * num_pieces, batch_playing)
            playing = asyncio.create_task(play_one(fabric.session, fabric.model, stream), name=stream.name)
            urgent_playing.append(playing)
        await asyncio.gather(batch_playing, *urgent_playing)
    finally:
        for task in (batch_playing, *urgent_playing):
            task.cancel()
        await asyncio.gather(batch_playing, *urgent_playing, return_exceptions=True)


async def _until_begun(batch: Sequence[MeasuredStream], num_pieces: float, batch_playing: asyncio.Task[None]) -> None:
    """Wait until the batch has so many pieces of text. Raises CommandError if it ends before."""
    while sum(len(stream.pieces_at) for stream in batch) < num_pieces:
        if batch_playing.done():
            errors = {stream.error for stream in batch if stream.error}
            raise CommandError(f"the batch ended early: {'; '.join(errors) or 'its text came in few pieces'}")
        await asyncio.sleep(_POLL_SECONDS)


def arrival_shares(num_urgent: int) -> list[float]:
    first, last = _ARRIVAL_SHARES
    return [first + (last - first) * number / max(1, num_urgent - 1) for number in range(num_urgent)]


def row_of(
    name: str,
    urgent: Sequence[MeasuredStream],
    batch: Sequence[MeasuredStream],
    alone: Sequence[MeasuredStream],
    explained: Mapping[str, ExplainResponse],
) -> PreemptionRow:
    """`explained` has what the router says of the batch's streams, where it matters."""
    ttfts = _ttfts(urgent)
    ends = [stream.pieces_at[-1] for stream in batch if stream.pieces_at]
    return PreemptionRow(
        run=name,
        ttft_p50=quantile(ttfts, 0.5),
        ttft_p99=quantile(ttfts, 0.99),
        num_preempted=sum(stream.num_preemptions > 0 for stream in batch),
        num_preemptions=sum(stream.num_preemptions for stream in batch),
        num_tokens_computed_again=sum(
            num_tokens_computed_again(stream, explained[stream.name]) for stream in batch if stream.name in explained
        ),
        num_errors=sum(bool(stream.error) for stream in (*batch, *urgent)),
        num_differing_answers=sum(
            num_differing_bytes(one.text, other.text) > 0 for one, other in zip(batch, alone, strict=True)
        ),
        batch_seconds=max(ends, default=0.0) - min(stream.sent_at for stream in batch) if ends else 0.0,
    )


def _ttfts(streams: Sequence[MeasuredStream]) -> list[float]:
    return sorted(ttft for stream in streams if (ttft := stream.ttft_seconds) is not None)
