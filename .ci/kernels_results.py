"""Writes what a kernel family computes from fixed inputs, so that two machines can be compared bit for bit.

    python .ci/kernels_results.py FAMILY NUM_THREADS MODEL_DIR OUT_DIR

MODEL_DIR is made if it is missing. Inputs are whole numbers divided by powers of two, and so the same everywhere.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from shard_server.engines.torch_engine.checkpoint.weights import expected_shapes
from shard_server.engines.torch_engine.config import LlamaConfig, load_config
from shard_server.engines.torch_engine.kernels.families import FAMILIES
from shard_server.engines.torch_engine.kernels.packed_linear import multiply
from shard_server.engines.torch_engine.kernels.packed_weights import PackedBf16, PackedInt8
from shard_server.engines.torch_engine.kernels.paged_attention import CompiledAttention
from shard_server.engines.torch_engine.kernels.products.outputs import FLOATS
from shard_server.engines.torch_engine.kernels.self_check import why_wrong
from shard_server.engines.torch_engine.kernels.thread_pool import ThreadPool
from shard_server.engines.torch_engine.kv_cache import KvCache
from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from shard_server.engines.torch_engine.operators.attention import Extent
from shard_server.engines.torch_engine.rope import rotation_table

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 320,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_chance = np.random.default_rng(5)


def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """bf16, roughly normal"""
    summed = _chance.integers(-(2**12), 2**12, (3, *shape)).sum(0)
    return torch.from_numpy(summed.astype(np.float32) * np.float32(2**-12 * scale)).bfloat16()


def main(family_name: str, num_threads: int, model_dir: Path, out_dir: Path) -> None:
    torch.set_num_threads(num_threads)
    threads = ThreadPool(FAMILIES[family_name])
    if threads.num_threads != num_threads:
        sys.exit(f"{threads.num_threads} threads compute, not {num_threads}")
    if not (model_dir / "model.safetensors").exists():
        make_model(model_dir)
    config = load_config(model_dir)
    wrong = why_wrong(threads, config)
    if wrong is not None:
        sys.exit(wrong)
    with torch.inference_mode():
        results = {**products(threads), **attention(threads, config), **forward(family_name, num_threads, model_dir)}
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        np.save(out_dir / f"{name}.npy", result.float().numpy())


def products(threads: ThreadPool) -> dict[str, torch.Tensor]:
    weight, bias, x = numbers(80, 192), numbers(80), numbers(29, 192)
    results: dict[str, torch.Tensor] = {}
    for name, pack in (("bf16", PackedBf16), ("int8", PackedInt8)):
        weights = pack(weight, bias, threads)
        for rows in (1, 3, 29):
            out = multiply(threads, weights, x[:rows].clone(), FLOATS, torch.zeros(rows, weights.num_columns))
            results[f"product_{name}_{rows}"] = out[:, :80].clone()
    return results


def attention(threads: ThreadPool, config: LlamaConfig) -> dict[str, torch.Tensor]:
    config, num_tokens = dataclasses.replace(config, num_layers=1, layer_windows=(None,)), 200
    cache = KvCache(config, num_blocks=13, block_size=16, dtype=torch.bfloat16)
    attention = CompiledAttention(config, cache, threads)
    attention.write(0, range(num_tokens), numbers(num_tokens, 2 * config.kv_size))
    plan = attention.plan([], [Extent(first_row=0, num_new=num_tokens, num_past=0, block_table=list(range(13)))])
    return {"attention": attention.attend(plan, 0, numbers(num_tokens, config.query_size)).clone()}


def forward(family_name: str, num_threads: int, model_dir: Path) -> dict[str, torch.Tensor]:
    sizes: dict[str, Any] = {"block_size": 16, "num_blocks": 32, "max_model_len": 256}
    runner = ModelRunner(model_dir, dtype="bfloat16", num_threads=num_threads, kernels=family_name, **sizes)
    tokens, tables = list(range(3, 170)), [list(range(12)), list(range(12, 24))]
    logits = [
        runner.run([ScheduledSequence(tokens[:10], 0, tables[0], True), ScheduledSequence(tokens, 0, tables[1], True)])
    ]
    for step in range(3):
        places = zip(tables, (10, len(tokens)), strict=True)
        logits.append(runner.run([ScheduledSequence([5 + step], past + step, table, True) for table, past in places]))
    cos, sin = rotation_table(256, 32, 1e4)
    return {"forward": torch.cat([rows.clone() for rows in logits]), "rotations": torch.cat([cos, sin])}


def make_model(model_dir: Path) -> None:
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(MODEL))
    weights = {
        name: numbers(*shape, scale=0.1) + (1 if "norm" in name else 0)
        for name, shape in expected_shapes(load_config(model_dir)).items()
    }
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
