"""Converts a Llama-family GGUF file into a directory that the engine (and transformers) loads directly.

GGUF stores quantised blocks, its own tensor names and permuted query/key rows. Doing that work once, and keeping
plain bf16 safetensors, is what makes an engine start in well under a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.gguf_tokenizer import build_tokenizer, end_of_sequence_ids
from shard_server.engines.torch_engine.rope import LLAMA3_ORIGINAL_WINDOW, RopeScaling, llama3_factors

if TYPE_CHECKING:
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

GgufFields = dict[str, Any]


def convert_gguf(gguf_path: Path, out_dir: Path, on_progress: Callable[[str], None] | None = None) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors (bf16)
    into `out_dir`, which is created. Raises EngineError when the file cannot be used; `out_dir` may then hold part of
    the files."""
    report = on_progress or (lambda _message: None)
    report(f"reading {gguf_path.name}")
    reader = _open(gguf_path)
    fields = _read_fields(gguf_path, reader)
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise EngineError(f"{gguf_path}: architecture {architecture!r} is not supported, only 'llama'")
    try:
        config = _model_config(fields, reader)
    except KeyError as error:
        raise EngineError(f"{gguf_path}: metadata {error} is missing") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise EngineError(f"{gguf_path}: unusable metadata: {error}") from error
    out_dir.mkdir(parents=True, exist_ok=True)
    report("building the tokenizer")
    tokenizer_config = build_tokenizer(gguf_path, fields, out_dir)
    eos_token_ids = end_of_sequence_ids(fields)
    report("converting the weights to bf16")
    tensors = _convert_tensors(gguf_path, reader, config)
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    config |= {
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }
    generation_config = {"bos_token_id": config["bos_token_id"], "eos_token_id": eos_token_ids}
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", generation_config)
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _open(gguf_path: Path) -> GGUFReader:
    try:
        return gguf.GGUFReader(gguf_path)
    except OSError as error:
        raise EngineError(f"{gguf_path}: {error.strerror or error}") from error
    # The reader trusts its input: a damaged file ends in whichever of these the bad length or offset leads to.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise EngineError(f"{gguf_path}: not a GGUF file, or a damaged or truncated one ({error})") from error


def _read_fields(gguf_path: Path, reader: GGUFReader) -> GgufFields:
    try:
        return {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, TypeError) as error:
        raise EngineError(f"{gguf_path}: damaged metadata ({error})") from error


def _model_config(fields: GgufFields, reader: GGUFReader) -> dict[str, Any]:
    """The HF-style configuration. Raises KeyError (missing metadata), ValueError, TypeError."""
    hidden_size = int(fields["llama.embedding_length"])
    num_heads = int(fields["llama.attention.head_count"])
    head_dim = int(fields.get("llama.attention.key_length", hidden_size // num_heads))
    if int(fields.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise ValueError("rotary embedding of a part of the head is not supported")
    if fields.get("llama.expert_count"):
        raise ValueError("mixture-of-experts models are not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(fields["llama.context_length"]),
        # float32 in the file; the shortest decimal that rounds to it is what the model's authors wrote.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10_000.0)),
        "rope_scaling": _rope_scaling(fields, reader, head_dim),
        "attention_bias": any(tensor.name.endswith("attn_q.bias") for tensor in reader.tensors),
        "mlp_bias": any(tensor.name.endswith("ffn_up.bias") for tensor in reader.tensors),
    }


def _rope_scaling(fields: GgufFields, reader: GGUFReader, head_dim: int) -> dict[str, Any] | None:
    """GGUF keeps Llama 3's scaling as a tensor of factors; find the parameters that give exactly those."""
    kind = fields.get("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ValueError(f"rope scaling {kind!r} is not supported")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(fields["llama.rope.scaling.factor"])}
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == _ROPE_FACTORS), None)
    if factors is None:
        return None
    scaling = RopeScaling(
        kind="llama3",
        factor=float(factors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=LLAMA3_ORIGINAL_WINDOW,
    )
    theta = float(fields.get("llama.rope.freq_base", 10_000.0))
    expected = llama3_factors(head_dim, theta, scaling).numpy()
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ValueError(f"{_ROPE_FACTORS} holds factors of an unknown kind of rope scaling")
    return scaling.to_json()


def _convert_tensors(gguf_path: Path, reader: GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        name = _hf_name(tensor.name)
        if name is None:
            raise EngineError(f"{gguf_path}: tensor {tensor.name!r} is not one of a Llama model")
        try:
            tensors[name] = _convert_tensor(tensor, config)
        except (ValueError, NotImplementedError) as error:
            raise EngineError(f"{gguf_path}: tensor {tensor.name!r} is damaged or unsupported ({error})") from error
    if "model.embed_tokens.weight" not in tensors:
        raise EngineError(f"{gguf_path}: tensor 'token_embd.weight' is missing")
    return tensors


def _hf_name(gguf_name: str) -> str | None:
    if gguf_name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES or parts[3] not in ("weight", "bias"):
        return None
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"


def _convert_tensor(tensor: ReaderTensor, config: dict[str, Any]) -> torch.Tensor:
    weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
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
