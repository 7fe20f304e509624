"""Reads a model's safetensors files and checks that every tensor is there, with the shape its config.json implies."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.config import LlamaConfig

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def load_weights(model_dir: Path, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Tensors by their name in the file, mapped from it rather than read. Raises EngineError."""
    expected = expected_shapes(config)
    weights: dict[str, torch.Tensor] = {}
    for path in _weight_files(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    if name in expected:
                        weights[name] = file.get_tensor(name)
        except OSError as error:
            raise EngineError(f"{path}: {error.strerror or error}") from error
        except (SafetensorError, ValueError, RuntimeError) as error:
            raise EngineError(f"{path}: not a safetensors file, or a damaged or truncated one ({error})") from error
    _check(model_dir, weights, expected)
    return weights


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a model of this configuration has, by its name in the file."""
    hidden, inner, query, kv = config.hidden_size, config.intermediate_size, config.query_size, config.kv_size
    linears = {  # name: (rows, columns, has a bias)
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    return shapes


def _weight_files(model_dir: Path) -> list[Path]:
    index_path = model_dir / "model.safetensors.index.json"
    if index_path.exists():
        try:
            names = set(json.loads(index_path.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise EngineError(f"{index_path}: damaged ({error})") from error
        return [model_dir / name for name in sorted(names)]
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{model_dir}: no .safetensors file in it")
    return files


def _check(model_dir: Path, weights: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise EngineError(f"{model_dir}: tensor {missing[0]!r}{more} missing")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != expected[name]:
            raise EngineError(
                f"{model_dir}: tensor {name!r} has shape {tuple(tensor.shape)}, config.json implies {expected[name]}"
            )
        if tensor.dtype not in _DTYPES:
            raise EngineError(f"{model_dir}: tensor {name!r} has type {tensor.dtype}, which is not supported")
