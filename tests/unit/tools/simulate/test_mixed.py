"""Batch jobs between the calls of a trace, and the figures of each class."""

from __future__ import annotations

import msgspec
import pytest

from tools.simulate.fleet.profile import PROFILES
from tools.simulate.runs import RunSpec, TraceSource, perform_run
from tools.simulate.statistics import Slo, summarise_classes
from tools.simulate.traces.mixed import CALLS_PER_JOB, INSTRUCTION_TOKENS, MixedWorkload
from tools.simulate.traces.open_loop import OpenTrace
from tools.simulate.workload import Call, Outcome, SimulationResult


def _trace(num_calls: int = 70) -> OpenTrace:
    calls = [Call(index, 1000, 20, (index * 1000 + 1,)) for index in range(num_calls)]
    return OpenTrace(calls, [float(index) for index in range(num_calls)], 0.0, 512)


def _mixed(load: float = 1.0, seed: int = 0) -> list[tuple[float, Call]]:
    return list(MixedWorkload(_trace().workload(load, seed), 0.3, seed).first_calls())


def test_the_share_is_that_of_all_requests():
    """A share that was of the interactive calls would understate the batch load."""
    arrivals = _mixed()
    assert sum(call.is_batch for _, call in arrivals) == 30
    assert len(arrivals) == 100
    assert [at for at, _ in arrivals] == sorted(at for at, _ in arrivals)
    assert len({call.call_id for _, call in arrivals}) == 100


def test_a_seed_gives_the_same_jobs_at_every_load():
    """Load levels are comparable only if they differ in nothing but their rate."""
    slow, fast = _mixed(1.0), _mixed(2.0)
    assert [call for _, call in slow if call.is_batch] == [call for _, call in fast if call.is_batch]
    assert [at / 2 for at, call in slow if call.is_batch] == pytest.approx([at for at, call in fast if call.is_batch])
    assert [call for _, call in _mixed(seed=1) if call.is_batch] != [call for _, call in slow if call.is_batch]


def test_calls_of_one_job_share_their_instructions_only():
    """Jobs without a shared prefix would be harder on the caches than real ones, jobs that share more easier."""
    batch = [call for _, call in _mixed() if call.is_batch]
    first, second, of_other_job = batch[0], batch[1], batch[CALLS_PER_JOB]
    num_shared = INSTRUCTION_TOKENS // 512
    assert list(first.block_hashes)[:num_shared] == list(second.block_hashes)[:num_shared]
    assert set(first.block_hashes[num_shared:]).isdisjoint(second.block_hashes)
    assert set(first.block_hashes).isdisjoint(of_other_job.block_hashes)
    assert all(len(call.block_hashes) == call.num_prompt_tokens // 512 for call in batch)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_impossible_share_is_refused(share: float):
    """A trace of batch calls alone has no arrivals to follow."""
    with pytest.raises(ValueError, match="between 0 and 1"):
        MixedWorkload(_trace().workload(1.0, 0), share, 0)


def test_each_class_has_its_own_slo_and_rates():
    """Goodput of batch by the limit of interactive requests would say nothing about either."""
    outcomes = [
        Outcome(Call(index, 100, 10, (), is_batch=index % 2 == 1), float(index), 0, 0, 5.0, index + 6.0)
        for index in range(40)
    ]
    slos = {"interactive": Slo(2.0), "batch": Slo(60.0, 0.2)}
    found = summarise_classes(SimulationResult(outcomes, (), 0.0, 0), slos, num_shards=1, num_measured_calls=40)
    assert found["interactive"].goodput == 0.0
    assert found["batch"].goodput == 1.0
    assert found["batch"].requests == 18
    assert found["batch"].goodput_per_second == pytest.approx(18 / 34)
    assert found["batch"].output_tokens_per_second == pytest.approx(15 * 10 / 34)


def test_interactive_answers_are_faster_if_their_class_is_known(tmp_path):
    """Batch prefill keeps away from them, on a small fleet that has more to do than it can."""
    path = tmp_path / "azure.csv"
    lines = [
        f"2024-01-01 00:{index // 120:02}:{index // 2 % 60:02}.{index % 2 * 5},1500,50" for index in range(220)
    ]  # with half of them the ratio is between 0.1 and 0.9, by the order of arrivals
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    source = TraceSource(path=str(path), format="azure")
    spec = RunSpec(
        trace=source, load=3.5, policy="ect", profile=PROFILES["70b"], num_shards=2, batch_share=0.3, has_classes=True
    )
    known = perform_run(spec, lambda *_: None).classes
    unknown = perform_run(msgspec.structs.replace(spec, has_classes=False), lambda *_: None).classes
    assert known["interactive"].tpot_mean is not None
    assert unknown["interactive"].tpot_mean is not None
    assert known["interactive"].tpot_mean < 0.9 * unknown["interactive"].tpot_mean
    assert known["batch"].failed == 0
