"""Layers with a sliding window compute what transformers computes, and bit for bit the same in every batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from tests.fakes.tiny_llama import write_tiny_llama
from tests.lazy_imports import imported_when_used

pytestmark = pytest.mark.xdist_group("transformers")  # which takes seconds to import
transformers = imported_when_used("transformers")

MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": 16, "use_sliding_window": True}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": MISTRAL | {"sliding_window": 24},
    "mistral-1": MISTRAL | {"sliding_window": 1, "num_key_value_heads": 4},
    "mistral-default": MISTRAL | {"max_position_embeddings": 8192},
    "qwen2-upper-layers": QWEN2 | {"sliding_window": 33, "max_window_layers": 1, "num_hidden_layers": 3},
    "qwen2-no-layer": QWEN2 | {"sliding_window": 33},
    "qwen3-layer-types": QWEN3 | {"sliding_window": 40, "num_hidden_layers": 3, "layer_types": KINDS},
}
MAX_ERROR = 1e-4
"""The largest difference of a logit, as for models without windows."""
NUM_BLOCKS = 400


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(320), k=num_tokens)


def load(model_dir: Path, dtype: str = "float32", block_size: int = 16, *, kernels: str = "auto") -> ModelRunner:
    return ModelRunner(
        model_dir,
        dtype=dtype,
        block_size=block_size,
        num_blocks=NUM_BLOCKS,
        max_model_len=2048,
        num_threads=1,
        kernels=kernels,
    )


@pytest.mark.parametrize("name", WINDOWED)
def test_windowed_layers_compute_what_transformers_computes(tmp_path: Path, name: str):
    """This depends on which layers have a window and on its exact end: a prefill in chunks, then tokens one by one."""
    model_dir = write_tiny_llama(tmp_path, **WINDOWED[name])
    token_ids = random_tokens(90, 1)
    runner = load(model_dir)
    table = list(range(9, 0, -1))
    runner.run([ScheduledSequence(token_ids[:37], 0, table, False)])
    rows = [runner.run([ScheduledSequence(token_ids[37:50], 37, table, True)])]
    rows += [runner.run([ScheduledSequence([token_ids[i]], i, table, True)]) for i in range(50, 90)]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        reference = model(torch.tensor([token_ids])).logits[0, 49:]
    assert float((torch.cat(rows) - reference).abs().max()) < MAX_ERROR


def test_keys_that_no_row_sees_are_left_out_unnoticed(tmp_path: Path):
    """Whole runs of keys far before the window are not gathered. The first gathered ones must be right, also when the
    blocks before them have been reused meanwhile."""
    model_dir = write_tiny_llama(tmp_path, **MISTRAL, sliding_window=100)
    token_ids = random_tokens(1300, 2)
    runner = load(model_dir)
    table = random.Random(3).sample(range(1, NUM_BLOCKS), 90)
    chunks = [
        runner.run([ScheduledSequence(token_ids[start : min(start + 270, 1298)], start, table, True)])
        for start in range(0, 1298, 270)
    ]
    # Every layer attends to 100 tokens, so from here on nothing depends on tokens before 1,024.
    forgotten = [0] * 64 + table[64:]
    rows = [chunks[-1], *(runner.run([ScheduledSequence([token_ids[i]], i, forgotten, True)]) for i in (1298, 1299))]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        reference = model(torch.tensor([token_ids])).logits[0, 1297:]
    assert float((torch.cat(rows) - reference).abs().max()) < MAX_ERROR


@pytest.mark.parametrize(
    ("dtype", "block_size", "kernels"),
    [
        ("bfloat16", 16, "auto"),
        ("bfloat16", 16, "generic"),
        ("bfloat16", 16, "torch"),
        pytest.param("float32", 16, "auto", marks=pytest.mark.long),  # its blocks of 5 are the harder case
        ("float32", 5, "auto"),
    ],
)
def test_windowed_results_do_not_depend_on_batch_chunks_or_reuse(
    tmp_path: Path, dtype: str, block_size: int, kernels: str
):
    """As without windows, chunks end anywhere, decoding starts at other keys than the prefill did, and prefix blocks
    belong to another sequence."""
    model_dir = write_tiny_llama(
        tmp_path, **QWEN3, sliding_window=70, max_window_layers=1, num_hidden_layers=3, head_dim=64
    )
    runner = load(model_dir, dtype, block_size, kernels=kernels)
    assert runner.batch_invariant
    prefix = random_tokens(300, 4)
    lengths = (303, 450, 584, 700)
    sequences = [prefix + random_tokens(n - len(prefix), n) for n in lengths]
    blocks = random.Random(5).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    shared = blocks[: 300 // block_size]
    tables: list[list[int]] = []
    taken = len(shared)
    alone: list[torch.Tensor] = []
    for token_ids in sequences:
        own = -(-len(token_ids) // block_size) - len(shared)
        tables.append(shared + blocks[taken : taken + own])
        # The blocks behind the prefix are reused again and again, so their content is overwritten.
        alone.append(runner.run([ScheduledSequence(token_ids, 0, tables[-1], True)]))
        taken += own if block_size > 5 else 0
    if block_size == 5:  # There are few blocks, so only one sequence runs at a time.
        return _check_chunks(runner, sequences[-1], tables[-1], alone[-1])
    chooser = random.Random(6)
    for _ in range(5):
        order = chooser.sample(range(4), chooser.randint(1, 4))
        starts = {i: chooser.choice([lengths[i] - 1, lengths[i] - 1, lengths[i] - 3, 288]) for i in order}
        batch = [ScheduledSequence(sequences[i][starts[i] :], starts[i], tables[i], True) for i in order]
        assert torch.equal(runner.run(batch), torch.cat([alone[i] for i in order]))
    return _check_chunks(runner, sequences[-1], tables[-1], alone[-1])


def _check_chunks(runner: ModelRunner, token_ids: list[int], table: list[int], expected: torch.Tensor) -> None:
    for chunk in (129, 333):
        logits = [
            runner.run([ScheduledSequence(token_ids[start : start + chunk], start, table, True)])
            for start in range(0, len(token_ids), chunk)
        ]
        assert torch.equal(logits[-1], expected)
