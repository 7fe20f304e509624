"""Every figure ends in time, whatever the speed of the machine, and says what it lacks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.virtual_time_engine import VirtualTimeEngine
from tools.bench.engine.report import measure_throughput
from tools.bench.engine.throughput import DECODE_STEPS, PREFILL_RUNS, ThroughputBench, prompt_lengths

MAX_SECONDS = 60.0


def bench_of(engine: VirtualTimeEngine) -> ThroughputBench:
    return ThroughputBench(engine, max_seconds=MAX_SECONDS, clock=engine.clock)


async def measured(engine: VirtualTimeEngine, *batches: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    await measure_throughput(engine, batches, report, max_seconds=MAX_SECONDS, clock=engine.clock)
    assert engine.is_closed
    return report


async def test_a_fast_engine_is_measured_completely() -> None:
    """All steps, all runs and the whole prompts, so that figures of several machines can be compared."""
    engine = VirtualTimeEngine(4000.0, 0.001)
    report = await measured(engine, 1, 8, 32)
    assert report["prefill"]["tokens_per_second"] == pytest.approx(4000.0)
    assert report["prefill"]["num_runs"] == PREFILL_RUNS
    for row in report["decode"]:
        assert row["tokens_per_second"] == pytest.approx(1000.0)
        assert row["num_steps"] == DECODE_STEPS
        assert row["prompt_tokens"] == prompt_lengths(row["batch"])
        assert row["note"] is None
        assert all(
            context >= length + DECODE_STEPS // 2
            for context, length in zip(row["context_tokens"], row["prompt_tokens"], strict=True)
        )


async def test_a_batch_decodes_together_where_prompts_come_in_small_chunks() -> None:
    """60 prompt tokens per second are 60 tokens per step: the first sequences decode for long before the last one is
    prefilled, and used to have ended by then."""
    engine = VirtualTimeEngine(60.0, 1 / 30)
    report = await measured(engine, 32)
    row = report["decode"][0]
    assert row["tokens_per_second"] == pytest.approx(30.0, rel=0.01)
    assert 1 < row["num_steps"] < DECODE_STEPS
    assert f"{row['num_steps']} steps instead of 48" in row["note"]
    assert "this machine is slow" in row["note"]
    assert sum(row["prompt_tokens"]) < sum(prompt_lengths(32))


@pytest.mark.parametrize("prefill_speed", [0.2, 1.0, 5.0, 20.0, 150.0, 1000.0])
@pytest.mark.parametrize("seconds_per_sequence", [0.0005, 0.05, 0.5, 20.0])
async def test_time_is_bounded_at_any_speed(prefill_speed: float, seconds_per_sequence: float) -> None:
    """A figure, or the reason why there is none, within the time and the steps in progress at its end."""
    engine = VirtualTimeEngine(prefill_speed, seconds_per_sequence)
    bench = bench_of(engine)
    longest_step_seconds = 32 / prefill_speed + 1 + 32 * seconds_per_sequence
    for measure in (bench.prefill(), bench.decode(1), bench.decode(8), bench.decode(32)):
        begin = engine.now
        figure = await measure
        assert engine.now - begin <= MAX_SECONDS + 2 * longest_step_seconds
        assert (figure.tokens_per_second is None) <= (figure.note is not None)
    if prefill_speed >= 60 and seconds_per_sequence <= 0.05:
        assert figure.tokens_per_second == pytest.approx(1 / seconds_per_sequence, rel=0.01)


async def test_an_engine_that_dies_keeps_the_figures_so_far() -> None:
    """They may have taken minutes."""
    report = await measured(VirtualTimeEngine(4000.0, 0.001, dies_above=4), 1, 8, 32)
    assert report["decode"][0]["tokens_per_second"] == pytest.approx(1000.0)
    for row in report["decode"][1:]:
        assert row["tokens_per_second"] is None
        assert row["note"] == "the engine has died: out of luck"


async def test_too_little_room_is_the_reason() -> None:
    """Waiting for a batch that can never run together would take all the time and explain nothing."""
    report = await measured(VirtualTimeEngine(4000.0, 0.001, num_blocks=64), 1, 32)
    assert report["decode"][0]["note"] is None
    assert report["decode"][1]["note"] == "64 KV blocks are too few for 32 sequences"
    report = await measured(VirtualTimeEngine(4000.0, 0.001, max_batch=4), 8)
    assert report["decode"][0]["note"] == "the engine runs 4 sequences at a time"


async def test_a_hung_engine_is_left_after_the_time() -> None:
    """There is no step whose end could be waited for."""
    engine = VirtualTimeEngine(4000.0, 0.001)
    engine.submit = lambda request: None
    report: dict[str, Any] = {}
    await measure_throughput(engine, (1, 8), report, max_seconds=0.01)
    assert report["prefill"]["tokens_per_second"] is None
    assert {row["note"] for row in report["decode"]} == {"the engine did not end its sequences within 0.01 s"}
