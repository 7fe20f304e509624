"""`kvloom-lab bench spot-notice`: streams under load, a shard that gets notice and is killed when the time is over, and
what the streams noticed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from kvloom.v1.router_service_pb2 import ExplainResponse
from kvloom.v1.shard_service_pb2 import DrainRequest, GetInfoRequest
from kvloom.v1.shard_service_pb2_grpc import ShardServiceStub
from kvloom_common.config import KvloomConfig
from kvloom_common.trust.fabric_trust import FabricTrust
from lab.bench.bench_fabric import SHARD_FLAGS, Device, bench_config, bench_fabric
from lab.bench.disturbed import CALL_TIMEOUT_SECONDS, num_differing_bytes, num_tokens_computed_again
from lab.bench.experiment import Column, Report, TableOf, count, experiment, flag
from tools.bench.streams import MeasuredStream, numbered_prompt, play
from tools.fabric_trust import trust_of_running
from tools.failures import CommandError
from tools.options import Seconds
from tools.supervisor.supervised_process import ProcessStatus

_POLL_SECONDS: Final = 0.02
_BEGUN_SHARE: Final = 0.1
"""Notice is given when every stream has its first token, and together they have this share of their tokens."""
_SHORT_SHARE: Final = 4
"""Every so manieth stream asks for a fifth of the tokens, so that some end in time."""


class NoticePlan(msgspec.Struct, frozen=True):
    num_streams: int
    num_prompt_words: int
    max_tokens: int
    within_seconds: float


class NoticeReport(msgspec.Struct, frozen=True):
    num_streams: int
    num_errors: int
    num_differing_bytes: int
    """Bytes of text that differ from those of the undisturbed run, and those that only one of them has."""
    num_on_noticed_shard: int
    num_finished_in_time: int
    num_moved: int
    """Taken to another shard before the end of their own."""
    num_returned: int
    """Returned by their shard when it had to end."""
    num_tokens_computed_again: int
    longest_pause_seconds: float
    undisturbed_pause_seconds: float
    shard_ended_after_seconds: float
    """After the notice."""
    shard_was_killed: bool
    """True when the shard had not ended by itself when the time was over."""


_COLUMNS: Final = (
    Column("", lambda _: ""),
    Column("streams", "num_streams"),
    Column("errors", "num_errors"),
    Column("differing bytes", "num_differing_bytes"),
    Column("streams on the shard with notice", "num_on_noticed_shard"),
    Column("  finished there in time", "num_finished_in_time"),
    Column("  moved before its end", "num_moved"),
    Column("  returned at its end", "num_returned"),
    Column("tokens computed again", "num_tokens_computed_again"),
    Column("longest pause of a stream", "longest_pause_seconds", ".2f", " s"),
    Column("  in the undisturbed run", "undisturbed_pause_seconds", ".2f", " s"),
    Column("the shard ended", lambda found: "killed" if found.shard_was_killed else "by itself"),
    Column("  after the notice", "shard_ended_after_seconds", ".1f", " s"),
)


@experiment(
    "spot-notice",
    count("--shards", 2, least=2, most=16, to="num_shards"),
    count(
        "--streams",
        8,
        "Answers that run at the same time; every fourth asks for a fifth of the tokens.",
        most=1024,
        to="num_streams",
    ),
    count("--prompt-words", 40, most=1000, to="num_prompt_words"),
    count("--max-tokens", 160, "Output tokens of each answer.", least=2, most=4000),
    flag(
        "--within",
        Seconds(600.0),
        "5s",
        "How long after the notice the shard is killed.",
        to="within_seconds",
        metavar="TIME",
    ),
    *SHARD_FLAGS,
)
def bench_spot_notice(num_shards: int, model: str, device: Device, data_dir: Path | None, **sizes: Any) -> Report:
    """Run streams on torch shards, give the busiest shard notice, and kill it when the time is over. Compares every
    answer with that of the same request in an undisturbed run before. Exits with 1 if one failed or differs."""
    plan = NoticePlan(**sizes)
    found = asyncio.run(run(bench_config("torch", model, device, data_dir, num_shards=num_shards), plan))
    title = f"A notice of {plan.within_seconds:g} s under load"
    is_right = not found.num_errors and not found.num_differing_bytes
    return Report(found, [TableOf(_COLUMNS, [found], title, is_turned=True)], is_right=is_right)


async def run(config: KvloomConfig, plan: NoticePlan) -> NoticeReport:
    """Raises CommandError."""
    async with bench_fabric(config) as fabric:
        undisturbed, disturbed = _streams(plan, "undisturbed"), _streams(plan, "noticed")
        await play(fabric.session, fabric.model, undisturbed)
        playing = asyncio.create_task(play(fabric.session, fabric.model, disturbed), name="streams")
        try:
            await _until_begun(disturbed, playing)
            trust = trust_of_running(fabric.folder)
            ended = await _give_notice(trust, fabric.processes("shard"), plan.within_seconds)
            await playing
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        return _report(undisturbed, disturbed, await fabric.explain(disturbed), ended)


def _streams(plan: NoticePlan, run_name: str) -> list[MeasuredStream]:
    short = max(1, plan.max_tokens // 5)
    return [
        MeasuredStream(
            f"{run_name}-{number}",
            plan.max_tokens if number % _SHORT_SHARE else short,
            numbered_prompt(number, plan.num_prompt_words),
            seed=number,
        )
        for number in range(plan.num_streams)
    ]


async def _until_begun(streams: Sequence[MeasuredStream], playing: asyncio.Task[None]) -> None:
    num_wanted = _BEGUN_SHARE * sum(stream.max_tokens for stream in streams)
    while not all(stream.pieces_at for stream in streams) or sum(len(s.pieces_at) for s in streams) < num_wanted:
        if playing.done():
            raise CommandError("the streams ended before notice could be given: ask for more tokens")
        await asyncio.sleep(_POLL_SECONDS)


class _Ended(msgspec.Struct, frozen=True):
    shard: str
    after_seconds: float
    was_killed: bool


async def _give_notice(trust: FabricTrust, shards: Sequence[ProcessStatus], within_seconds: float) -> _Ended:
    """Give notice to the shard with most to do, and kill it when the time is over. Returns when it is gone."""
    loads = await asyncio.gather(*(_num_running(trust, shard) for shard in shards))
    shard = max(zip(loads, shards, strict=True), key=lambda pair: pair[0])[1]
    if shard.pid is None:
        raise CommandError(f"{shard.name} does not run")
    process = psutil.Process(shard.pid)
    began = time.monotonic()
    async with trust.open_channel(shard.address, "shard", shard.name) as channel:
        order = DrainRequest(draining=True, empty_within_seconds=within_seconds, exit=True)
        answer = await ShardServiceStub(channel).Drain(order, timeout=CALL_TIMEOUT_SECONDS)
        if answer.HasField("error"):
            raise CommandError(answer.error.message)
    while time.monotonic() < began + within_seconds:
        if not _runs(process):
            break
        await asyncio.sleep(_POLL_SECONDS)
    after_seconds, was_killed = time.monotonic() - began, _runs(process)
    if was_killed:
        os.kill(shard.pid, signal.SIGKILL)
    return _Ended(shard.name, after_seconds, was_killed)


async def _num_running(trust: FabricTrust, shard: ProcessStatus) -> int:
    async with trust.open_channel(shard.address, "shard", shard.name) as channel:
        info = await ShardServiceStub(channel).GetInfo(GetInfoRequest(), timeout=CALL_TIMEOUT_SECONDS)
        return info.load.num_running + info.load.num_waiting


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _report(
    undisturbed: Sequence[MeasuredStream],
    disturbed: Sequence[MeasuredStream],
    explained: dict[str, ExplainResponse],
    ended: _Ended,
) -> NoticeReport:
    num_on_shard = num_finished = num_moved = num_returned = num_again = 0
    for stream in disturbed:
        answer = explained[stream.name]
        shards = [decision.plan.picked_shard_id for decision in answer.decisions]
        if ended.shard not in shards:
            continue
        num_on_shard += 1
        if len(shards) == 1:
            num_finished += 1
            continue
        num_moved += answer.outcome.num_notice_migrations > 0
        num_returned += not answer.outcome.num_notice_migrations
        num_again += num_tokens_computed_again(stream, answer)
    return NoticeReport(
        num_streams=len(disturbed),
        num_errors=sum(bool(stream.error) for stream in (*undisturbed, *disturbed)),
        num_differing_bytes=sum(
            num_differing_bytes(one.text, other.text) for one, other in zip(undisturbed, disturbed, strict=True)
        ),
        num_on_noticed_shard=num_on_shard,
        num_finished_in_time=num_finished,
        num_moved=num_moved,
        num_returned=num_returned,
        num_tokens_computed_again=num_again,
        longest_pause_seconds=max(stream.longest_pause_seconds for stream in disturbed),
        undisturbed_pause_seconds=max(stream.longest_pause_seconds for stream in undisturbed),
        shard_ended_after_seconds=ended.after_seconds,
        shard_was_killed=ended.was_killed,
    )
