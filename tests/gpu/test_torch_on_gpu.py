"""The torch engine on an NVIDIA GPU: the same answers as on a CPU, from recorded steps and Triton's kernels."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kvloom_common.config import ShardConfig, TorchConfig
from shard_server.engines.base import EngineRequest, Sampling, SequenceFinishReason
from shard_server.engines.torch_engine.checkpoint.weights import load_weights
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.device.runner import DeviceOptions, DeviceRunner
from shard_server.engines.torch_engine.engine import TorchEngine
from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from tests.fakes.tiny_llama import write_tiny_llama
from tests.step_bench import StepBench, same
from tools.bench.engine.device import run_device_bench

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} sees no NVIDIA GPU here"),
]
NUM_BLOCKS = 60


def gpu_runner(model_dir: Path, dtype: torch.dtype, *, invariant: bool) -> DeviceRunner:
    config = load_config(model_dir)
    options = DeviceOptions(
        torch.device("cuda"), dtype, 16, NUM_BLOCKS, 512, max_rows=24, wants_batch_invariance=invariant
    )
    return DeviceRunner(config, load_weights(model_dir, config), options)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_recorded_steps_and_prompts_give_the_logits_of_the_cpu(tmp_path: Path, window: int | None, invariant: bool):
    """Every recorded size, with padding rows and blocks that hold something else in the next step."""
    family = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    model_dir = write_tiny_llama(tmp_path, **family, head_dim=64)
    runner = gpu_runner(model_dir, torch.float32, invariant=invariant)
    reference = ModelRunner(
        model_dir, dtype="float32", block_size=16, num_blocks=NUM_BLOCKS, max_model_len=512, num_threads=1
    )
    chooser = random.Random(1)
    ids = [chooser.choices(range(320), k=300) for _ in range(3)]
    tables = [list(range(20 * i, 20 * i + 20)) for i in range(3)]
    for start, end in ((0, 200), (200, 280)):
        batch = [ScheduledSequence(ids[i][start:end], start, tables[i], True) for i in range(3)]
        torch.testing.assert_close(runner.run(batch).cpu(), reference.run(batch), rtol=1e-3, atol=1e-3)
    for position in range(280, 300):
        chosen = chooser.sample(range(3), chooser.randint(1, 3))
        batch = [ScheduledSequence(ids[i][position : position + 1], position, tables[i], True) for i in chosen]
        reference_batch = [ScheduledSequence(ids[i][280 : position + 1], 280, tables[i], True) for i in chosen]
        reference_logits, logits = reference.run(reference_batch), runner.run(batch).cpu()
        torch.testing.assert_close(logits, reference_logits, rtol=1e-3, atol=1e-3)
        for i in set(range(3)) - set(chosen):
            runner.run([ScheduledSequence(ids[i][position : position + 1], position, tables[i], True)])


def test_the_invariant_mode_is_invariant(tmp_path: Path):
    """It is measured at the start; here it must be found to hold, or the engine promises less than documented."""
    model_dir = write_tiny_llama(tmp_path, head_dim=64, hidden_size=256, intermediate_size=512)
    assert gpu_runner(model_dir, torch.bfloat16, invariant=True).batch_invariant


async def test_the_engine_answers_on_the_gpu(tmp_path: Path):
    """The whole loop: recorded steps in the compute thread, tokens drawn together on the device."""
    config = ShardConfig(max_batch=8, num_blocks=NUM_BLOCKS, max_model_len=256, torch=TorchConfig(device="cuda"))
    engine = TorchEngine(write_tiny_llama(tmp_path, head_dim=64), "tiny", config)
    await engine.start()
    answers: dict[str, list[int]] = {}
    ends: dict[str, SequenceFinishReason] = {}
    try:
        for index in range(6):
            sampling = Sampling(temperature=0.0 if index % 2 else 0.9, seed=7, top_p=0.9 if index > 3 else 1.0)
            engine.submit(EngineRequest(f"r{index}", [5, 6, 7 + index % 2], sampling, 20))
        async for output in engine.steps():
            for request_id, token_ids in zip(output.request_ids, output.token_ids, strict=True):
                answers.setdefault(request_id, []).extend(token_ids)
            ends |= {end.request_id: end.reason for end in output.ends}
            if len(ends) == 6:
                break
    finally:
        await engine.close()
    assert set(ends.values()) == {SequenceFinishReason.LENGTH}
    assert answers["r0"] == answers["r2"]
    assert answers["r1"] == answers["r3"] == answers["r5"]


def test_nothing_but_reading_tokens_waits_for_the_device(tmp_path: Path):
    """A hidden wait, such as that of a copy from pageable memory, would leave the device idle in every step."""
    runner = gpu_runner(write_tiny_llama(tmp_path, head_dim=64), torch.bfloat16, invariant=False)
    bench = StepBench(runner, block_size=16, num_blocks=NUM_BLOCKS)
    bench.loop.warm_up(64)
    samplings = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.8, seed=1, top_p=0.9),
        Sampling(presence_penalty=0.5, repetition_penalty=1.1, logit_bias=((3, 1.0),), num_logprobs=2),
    ]
    requests = [EngineRequest(f"r{i}", [5, 6, 7 + i], one, 20) for i, one in enumerate(samplings)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        answers = bench.run(*requests)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    in_turn = StepBench(runner, block_size=16, num_blocks=NUM_BLOCKS, overlaps=False).run(*requests)
    assert [name for name, answer in answers.items() if not same(answer, in_turn[name])] == []


def test_the_measurement_runs(tmp_path: Path):
    """Before any waiting for the large one."""
    report = run_device_bench("tiny", "cuda")
    assert report["parity"]["largest_logit_difference"] < 1e-3
