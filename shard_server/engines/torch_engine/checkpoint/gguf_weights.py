"""The tensors of a GGUF file as bf16 safetensors, under the names and in the row order of transformers; quantised ones
also as they are."""

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
from shard_server.engines.torch_engine.checkpoint.gguf_blocks import grouped_weight
from shard_server.engines.torch_engine.checkpoint.gguf_config import EMBEDDINGS, OUTPUT, ROPE_FACTORS
from shard_server.engines.torch_engine.checkpoint.packed_files import PACKED_STEM, PACKED_SUFFIX, packed_parts

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
    """Write model.safetensors, or several files and their index; and quantised blocks beside them, see
    packed_files.py. Raises EngineError."""
    names: set[str] = set()
    weights, blocks = _Files(out_dir, "model", ".safetensors"), _Files(out_dir, PACKED_STEM, PACKED_SUFFIX)
    has_head = any(tensor.name == OUTPUT for tensor in reader.tensors)
    for number, (name, tensor) in enumerate(_named(gguf_path, reader, config), 1):
        if number % _TENSORS_PER_REPORT == 1:
            report(f"converting the weights: tensor {number} of {len(reader.tensors)}")
        if name in names:
            raise EngineError(f"{gguf_path}: tensor {name!r} is there twice")
        names.add(name)
        try:
            weights.add({name: _convert_tensor(tensor, config)})
            grouped = grouped_weight(_in_order(tensor.data, tensor.name, config), tensor.tensor_type)
        except (ValueError, NotImplementedError) as error:
            raise EngineError(f"{gguf_path}: tensor {tensor.name!r} is damaged or unsupported ({error})") from error
        # An embedding that is no head is only looked up.
        if grouped is not None and not (has_head and tensor.name == EMBEDDINGS):
            blocks.add(packed_parts(name, grouped))
    places = weights.finish()
    blocks.finish()
    if len(set(places.values())) > 1:
        index = json.dumps({"metadata": {}, "weight_map": places}, indent=2)
        (out_dir / "model.safetensors.index.json").write_text(index + "\n")


class _Files:
    """Writes tensors into one file, STEM + SUFFIX, or several that are numbered."""

    def __init__(self, folder: Path, stem: str, suffix: str) -> None:
        self._folder, self._stem, self._suffix = folder, stem, suffix
        self._pending: dict[str, torch.Tensor] = {}
        self._places: dict[str, str] = {}
        self._num_files = 0

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        self._pending |= tensors
        if sum(tensor.nbytes for tensor in self._pending.values()) >= _MAX_FILE_BYTES:
            self._write(numbered=True)

    def finish(self) -> dict[str, str]:
        """Write what is left. Returns the names of the tensors' files."""
        if self._pending:
            self._write(numbered=self._num_files > 0)
        return self._places

    def _write(self, *, numbered: bool) -> None:
        self._num_files += 1
        name = f"{self._stem}-{self._num_files:05}{self._suffix}" if numbered else self._stem + self._suffix
        self._places.update(dict.fromkeys(self._pending, name))
        save_file(self._pending, self._folder / name, metadata={"format": "pt"})
        self._pending = {}


def _named(gguf_path: Path, reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, ReaderTensor]]:
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        name = _hf_name(tensor.name)
        if name is None:
            raise EngineError(f"{gguf_path}: tensor {tensor.name!r} is not one of a {config['model_type']} model")
        yield name, tensor


def _hf_name(gguf_name: str) -> str | None:
    if gguf_name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES or parts[3] not in ("weight", "bias"):
        return None
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"


def _convert_tensor(tensor: ReaderTensor, config: dict[str, Any]) -> torch.Tensor:
    weight = _in_order(gguf.quants.dequantize(tensor.data, tensor.tensor_type), tensor.name, config)
    # Unquantised tensors are views of the read-only file mapping, which torch refuses to wrap.
    weight = np.require(weight, dtype=np.float32, requirements=["C", "W"])
    return torch.from_numpy(weight).to(torch.bfloat16)


def _in_order(rows: np.ndarray, name: str, config: dict[str, Any]) -> np.ndarray:
    """The rows of a tensor, of numbers or of blocks, in the order of transformers."""
    if config["model_type"] in _PERMUTED:
        if ".attn_q." in name:
            return _unpermute(rows, config["num_attention_heads"])
        if ".attn_k." in name:
            return _unpermute(rows, config["num_key_value_heads"])
    return rows


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of the rows of a head (pairs interleaved) to HF's (two halves)."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
