"""Small random models in the layouts that real ones come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from shard_server.engines.torch_engine.checkpoint.weights import expected_shapes
from shard_server.engines.torch_engine.config import load_config

TINY_CONFIG: dict[str, Any] = {
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
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 320,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_llama(model_dir: Path, **changes: Any) -> Path:
    """A model directory with `TINY_CONFIG` and `changes`, and random bf16 weights (always the same)."""
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(TINY_CONFIG | changes))
    save_file(tiny_weights(model_dir), model_dir / "model.safetensors", metadata={"format": "pt"})
    return model_dir


def tiny_weights(model_dir: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(load_config(model_dir)).items():
        scale, shift = (0.1, 1.0) if "norm" in name else (0.15, 0.0)
        weights[name] = (torch.randn(shape, generator=generator) * scale + shift).to(torch.bfloat16)
    return weights


def write_tiny_gguf(
    path: Path,
    weights: dict[str, torch.Tensor],
    *,
    architecture: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **changes: Any,
) -> Path:
    """The same weights as a GGUF file (matrices quantised), laid out as llama.cpp's converter does: names, metadata,
    and for Llama permuted query and key rows."""
    config = TINY_CONFIG | changes
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    _add_vocabulary(writer)
    names = gguf.get_tensor_name_map(_model_arch(architecture), config["num_hidden_layers"])
    for name, weight in weights.items():
        rows = weight.float()
        if architecture == "llama" and "q_proj" in name:
            rows = _permute(rows, config["num_attention_heads"])
        elif architecture == "llama" and "k_proj" in name:
            rows = _permute(rows, config["num_key_value_heads"])
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None
        array = rows.contiguous().numpy()
        if array.ndim == 2 and quantization != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name, gguf.quants.quantize(array, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name, array)
    if factors := config.get("rope_factors"):
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _model_arch(architecture: str) -> gguf.MODEL_ARCH:
    arch = next((arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    return gguf.MODEL_ARCH.LLAMA if arch is None or architecture == "falcon" else arch


def _permute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Three control tokens, the 256 bytes as byte-level BPE spells them, and a few merges."""
    byte_tokens = sorted(_byte_spellings())
    merges = ["h e", "l l", "he ll", "hell o"]
    tokens = ["<unk>", "<s>", "<|im_end|>", *byte_tokens, *(merge.replace(" ", "") for merge in merges)]
    tokens += [f"filler{index}" for index in range(TINY_CONFIG["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _byte_spellings() -> list[str]:
    """GPT-2's printable spelling of every byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
