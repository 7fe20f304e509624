"""The tensors of a GGUF file as bf16 safetensors, under the names and in the row order of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.gguf_config import EMBEDDINGS, OUTPUT, ROPE_FACTORS

if TYPE_CHECKING:
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor

_TOP_LEVEL_NAMES = {
    EMBEDDINGS: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PERMUTED = ("llama", "mistral")
"""Families whose query and key rows llama.cpp's converter reorders."""
_TENSORS_PER_REPORT = 100
_MAX_FILE_BYTES = 2**30
"""The approximate size of one file of weights, which conversion keeps in memory at a time."""


def convert_weights(
    gguf_path: Path, reader: GGUFReader, config: dict[str, Any], out_dir: Path, report: Callable[[str], None]
) -> None:
    """Write model.safetensors, or several files and their index. Raises EngineError."""
    names: set[str] = set()
    places: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    num_files = 0

    def write(file_name: str) -> None:
        places.update(dict.fromkeys(pending, file_name))
        save_file(pending, out_dir / file_name, metadata={"format": "pt"})
        pending.clear()

    for number, (name, weight) in enumerate(_converted(gguf_path, reader, config), 1):
        if number % _TENSORS_PER_REPORT == 1:
            report(f"converting the weights to bf16: tensor {number} of {len(reader.tensors)}")
        if name in names:
            raise EngineError(f"{gguf_path}: tensor {name!r} is there twice")
        names.add(name)
        pending[name] = weight
        if sum(tensor.nbytes for tensor in pending.values()) >= _MAX_FILE_BYTES:
            num_files += 1
            write(f"model-{num_files:05}.safetensors")
    if not num_files:
        write("model.safetensors")
    else:
        if pending:
            write(f"model-{num_files + 1:05}.safetensors")
        index = json.dumps({"metadata": {}, "weight_map": places}, indent=2)
        (out_dir / "model.safetensors.index.json").write_text(index + "\n")


def _converted(gguf_path: Path, reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        name = _hf_name(tensor.name)
        if name is None:
            raise EngineError(f"{gguf_path}: tensor {tensor.name!r} is not one of a {config['model_type']} model")
        try:
            weight = _convert_tensor(tensor, config)
        except (ValueError, NotImplementedError) as error:
            raise EngineError(f"{gguf_path}: tensor {tensor.name!r} is damaged or unsupported ({error})") from error
        yield name, weight


def _hf_name(gguf_name: str) -> str | None:
    if gguf_name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES or parts[3] not in ("weight", "bias"):
        return None
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"


def _convert_tensor(tensor: ReaderTensor, config: dict[str, Any]) -> torch.Tensor:
    weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if config["model_type"] in _PERMUTED:
        if ".attn_q." in tensor.name:
            weight = _unpermute(weight, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            weight = _unpermute(weight, config["num_key_value_heads"])
    # Unquantised tensors are views of the read-only file mapping, which torch refuses to wrap.
    weight = np.require(weight, dtype=np.float32, requirements=["C", "W"])
    return torch.from_numpy(weight).to(torch.bfloat16)


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of the rows of a head (pairs interleaved) to HF's (two halves)."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
