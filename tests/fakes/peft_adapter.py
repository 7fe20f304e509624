"""LoRA adapters with random weights in PEFT's format, and models with an adapter merged into their weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from shard_server.engines.torch_engine.config import LlamaConfig, load_config
from shard_server.engines.torch_engine.lora.peft import MODULES, module_sizes


def tensor_name(layer: int, module: str, matrix: str) -> str:
    parent = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"base_model.model.model.layers.{layer}.{parent}.{module}.lora_{matrix}.weight"


def random_tensors(
    config: LlamaConfig, rank: int, modules: Sequence[str], seed: int, size: float
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(config.num_layers):
        for module in modules:
            num_in, num_out = module_sizes(config)[module]
            tensors[tensor_name(layer, module, "A")] = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
            tensors[tensor_name(layer, module, "B")] = torch.randn(num_out, rank, generator=generator) * size
    return tensors


def write_peft_adapter(
    model_dir: Path,
    path: Path,
    *,
    rank: int = 8,
    modules: Sequence[str] = MODULES,
    seed: int = 1,
    size: float = 0.05,
    tensors: dict[str, torch.Tensor] | None = None,
    **changes: Any,
) -> Path:
    """Returns `path`, which gets a random adapter of the model; `changes` are those of adapter_config.json. `size` is
    the standard deviation of B."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    config |= {"target_modules": list(modules), "bias": "none"} | changes
    (path / "adapter_config.json").write_text(json.dumps(config))
    if tensors is None:
        tensors = random_tensors(load_config(model_dir), rank, modules, seed, size)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def write_merged_model(model_dir: Path, adapter: Path, target: Path) -> Path:
    """Returns `target`, which gets the model with W + scale B A in place of W, in the type of W."""
    shutil.copytree(model_dir, target)
    content = json.loads((adapter / "adapter_config.json").read_text())
    scale = content["lora_alpha"] / content["r"]
    matrices = load_file(adapter / "adapter_model.safetensors")
    for file in target.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{prefix}.lora_A.weight" in matrices:
                delta = matrices[f"{prefix}.lora_B.weight"] @ matrices[f"{prefix}.lora_A.weight"] * scale
                weights[name] = (weight.float() + delta).to(weight.dtype)
        save_file(weights, file, metadata={"format": "pt"})
    return target
