"""The accelerator's runner, on the CPU. Plans, static buffers and batches use the same code there; only the attention
kernel of single rows is the plain one, and no step is recorded as a graph."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_server.engines.base import EngineError, EngineRequest, Sampling
from shard_server.engines.torch_engine.checkpoint.weights import load_weights
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.device.runner import DeviceOptions, DeviceRunner, find_device, load_device_runner
from shard_server.engines.torch_engine.lora.peft import read_adapter
from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from tests.fakes.peft_adapter import write_peft_adapter
from tests.fakes.tiny_llama import write_tiny_llama
from tests.step_bench import StepBench, same

NUM_BLOCKS = 60
SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "qk-norm-windows": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 21,
        "max_window_layers": 1,
    },
    "mha-untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
}


def device_runner(model_dir: Path, **options: Any) -> DeviceRunner:
    config = load_config(model_dir)
    given = DeviceOptions(
        torch.device("cpu"), torch.float32, 16, num_blocks=NUM_BLOCKS, max_model_len=256, max_rows=24, **options
    )
    return DeviceRunner(config, load_weights(model_dir, config), given)


def cpu_runner(model_dir: Path) -> ModelRunner:
    return ModelRunner(
        model_dir, dtype="float32", block_size=16, num_blocks=NUM_BLOCKS, max_model_len=256, num_threads=1
    )


def random_steps(seed: int) -> list[list[ScheduledSequence]]:
    """Returns steps of six sequences: prompts in chunks, some with logits of their last tokens, decoding, drafts, and
    all of these in one step."""
    chooser = random.Random(seed)
    blocks = chooser.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = [blocks[10 * i : 10 * i + 10] for i in range(6)]
    ids = [chooser.choices(range(320), k=150) for _ in range(6)]
    done = [0] * 6
    steps: list[list[ScheduledSequence]] = []
    while min(done) < 140:
        batch: list[ScheduledSequence] = []
        for i in chooser.sample(range(6), chooser.randint(1, 6)):
            size = min(chooser.choice([1, 1, 4, 50]), 150 - done[i])
            if size:
                drafts = 3 if size == 4 else 0
                num_logits = chooser.choice([0, 1, 7, 50]) if size == 50 else 0
                part = ids[i][done[i] : done[i] + size]
                batch.append(ScheduledSequence(part, done[i], tables[i], size < 50, drafts, num_logits))
                done[i] += size
        steps += [batch] if batch else []
    return steps


@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_gives_the_logits_of_the_cpu_engine(tmp_path: Path, shape: str, invariant: bool):
    """Paging, chunks, drafts, windows and padding rows use static buffers of fixed sizes, so any wrong slot shows."""
    model_dir = write_tiny_llama(tmp_path, **SHAPES[shape])
    runner, reference = device_runner(model_dir, wants_batch_invariance=invariant), cpu_runner(model_dir)
    for batch in random_steps(1):
        torch.testing.assert_close(runner.run(batch), reference.run(batch), rtol=1e-4, atol=1e-4)


def test_hidden_states_are_those_of_the_cpu_engine(tmp_path: Path):
    """In chunks, of a single token, and beside decoding sequences: embeddings are made of them."""
    model_dir = write_tiny_llama(tmp_path)
    runner, reference = device_runner(model_dir), cpu_runner(model_dir)
    ids = random.Random(3).choices(range(320), k=60)
    tables = [list(range(4 * i, 4 * i + 4)) for i in range(3)]
    for begin, end in ((0, 33), (33, 34), (34, 60)):
        batch = [
            ScheduledSequence(ids[begin:end], begin, tables[0], False, wants_hidden_states=True),
            ScheduledSequence(ids[:1] if not begin else ids[begin:end], begin if begin else 0, tables[1], True),
            ScheduledSequence(ids[begin:end], begin, tables[2], False, wants_hidden_states=True),
        ]
        torch.testing.assert_close(runner.run(batch), reference.run(batch), rtol=1e-4, atol=1e-4)
        found, expected = runner.hidden_states(), reference.hidden_states()
        assert [len(states) for states in found] == [end - begin] * 2
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    runner.run([ScheduledSequence(ids[:2], 0, tables[0], True)])
    assert runner.hidden_states() == []


@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
def test_rows_with_adapters_share_steps_with_others(tmp_path: Path, invariant: bool):
    """Prompts in chunks, decoding and drafts, each with one of two adapters or none."""
    model_dir = write_tiny_llama(tmp_path / "model")
    runner, reference = device_runner(model_dir, wants_batch_invariance=invariant), cpu_runner(model_dir)
    paths = [write_peft_adapter(model_dir, tmp_path / "all", rank=8, seed=1)]
    paths.append(write_peft_adapter(model_dir, tmp_path / "two", rank=5, modules=["q_proj", "v_proj"], seed=2))
    weights = [read_adapter(path, runner.config, max_rank=64) for path in paths]
    ours, theirs = ([None, *map(one.adapter, weights)] for one in (runner, reference))
    for batch in random_steps(2)[:8]:
        numbers = [sequence.block_table[0] % 3 for sequence in batch]
        steps = [
            [dataclasses.replace(one, adapter=own[number]) for one, number in zip(batch, numbers, strict=True)]
            for own in (ours, theirs)
        ]
        torch.testing.assert_close(runner.run(steps[0]), reference.run(steps[1]), rtol=1e-4, atol=1e-4)


def test_more_rows_than_the_largest_step_are_split(tmp_path: Path):
    """Sequences and their drafts together may have more rows than the largest step."""
    model_dir = write_tiny_llama(tmp_path)
    runner, reference = device_runner(model_dir), cpu_runner(model_dir)
    batch = [ScheduledSequence([i + 1], 0, [i], True) for i in range(50)]
    torch.testing.assert_close(runner.run(batch), reference.run(batch), rtol=1e-4, atol=1e-4)
    assert runner.run([ScheduledSequence([1, 2, 3], 0, [0], False)]).shape == (0, 320)


def test_invariance_is_claimed_only_where_it_was_measured(tmp_path: Path):
    """Failover relies on this claim."""
    model_dir = write_tiny_llama(tmp_path)
    runner = device_runner(model_dir, wants_batch_invariance=True)
    ids = random.Random(2).choices(range(320), k=90)
    table = list(range(6))
    whole = runner.run([ScheduledSequence(ids, 0, table, True)]).clone()
    runner.run([ScheduledSequence(ids[:40], 0, table, False)])
    others = [ScheduledSequence([7], 0, [10 + i], True) for i in range(9)]
    mixed = runner.run([ScheduledSequence(ids[40:], 40, table, True), *others])
    decoded = runner.run([*others, ScheduledSequence(ids[-1:], 89, table, True)])
    if runner.batch_invariant:
        assert torch.equal(mixed[:1], whole)
        assert torch.equal(decoded[-1:], whole)
    assert not device_runner(model_dir).batch_invariant


def test_overlapped_steps_give_the_answers_of_steps_in_turn(tmp_path: Path):
    """To the bit, with the runner's own buffers: tokens that only the device knows, chunks, cached prefixes
    and few blocks. (The loop by itself: tests/unit/shard_server/torch_engine/test_overlapped_steps.py.)"""
    model_dir = write_tiny_llama(tmp_path)
    runner = device_runner(model_dir, wants_batch_invariance=True)
    if not runner.batch_invariant:
        pytest.skip("this machine's products depend on the number of rows")
    chooser = random.Random(4)
    common = chooser.choices(range(3, 320), k=40)
    requests: list[EngineRequest] = []
    for index in range(8):
        sampling = Sampling(
            temperature=chooser.choice([0.0, 0.9]),
            top_p=chooser.choice([1.0, 0.8]),
            seed=index,
            presence_penalty=chooser.choice([0.0, 0.6]),
            num_logprobs=chooser.choice([None, 2]),
        )
        prompt = common[: chooser.randrange(41)] + chooser.choices(range(3, 320), k=chooser.randrange(1, 30))
        stops = frozenset(chooser.choices(range(320), k=20))
        requests.append(EngineRequest(f"r{index}", prompt, sampling, chooser.randrange(1, 30), stops))
    answers = [
        StepBench(runner, block_size=16, num_blocks=16, budget=30, max_batch=6, overlaps=overlaps).run(*requests)
        for overlaps in (True, False)
    ]
    for name, answer in answers[0].items():
        assert same(answer, answers[1][name]), name
    assert len({answer.reason for answer in answers[0].values()}) == 2


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_without_cuda_the_error_names_what_to_install(tmp_path: Path):
    """There is no stack trace of torch."""
    assert find_device("cpu").type == "cpu"
    with pytest.raises(EngineError, match="built without CUDA: install the CUDA build of torch 2"):
        find_device("cuda")
    with pytest.raises(EngineError, match="built without CUDA"):
        load_device_runner(
            write_tiny_llama(tmp_path),
            device="cuda",
            max_rows=8,
            dtype="bfloat16",
            block_size=16,
            num_blocks=0,
            max_model_len=0,
            num_threads=0,
            wants_batch_invariance=True,
            weights="auto",
            kernels="auto",
            shared_cores=0,
            shares_weights=False,
            on_progress=lambda _message: None,
        )
