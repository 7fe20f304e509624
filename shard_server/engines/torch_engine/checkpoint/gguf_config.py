"""Converts the metadata of a GGUF file to a configuration in Hugging Face's layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shard_server.engines.torch_engine.rope import LLAMA3_ORIGINAL_WINDOW, RopeScaling, llama3_factors

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF's name of an architecture → the name in transformers. Mistral's models are "llama" in GGUF."""
ROPE_FACTORS = "rope_freqs.weight"
EMBEDDINGS = "token_embd.weight"
OUTPUT = "output.weight"

GgufFields = dict[str, Any]


def model_config(fields: GgufFields, reader: GGUFReader) -> dict[str, Any]:
    """The content of config.json. Raises KeyError (missing metadata), ValueError, TypeError."""
    architecture = fields["general.architecture"]

    def field(name: str, *default: Any) -> Any:
        key = f"{architecture}.{name}"
        return fields.get(key, *default) if default else fields[key]

    hidden_size = int(field("embedding_length"))
    num_heads = int(field("attention.head_count"))
    head_dim = int(field("attention.key_length", hidden_size // num_heads))
    if int(field("attention.value_length", head_dim)) != head_dim:
        raise ValueError("values of another size than keys are not supported")
    if int(field("rope.dimension_count", head_dim)) != head_dim:
        raise ValueError("rotary embedding of a part of the head is not supported")
    if field("expert_count", 0):
        raise ValueError("mixture-of-experts models are not supported")
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": int(field("feed_forward_length")),
        "num_hidden_layers": int(field("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(field("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(field("context_length")),
        # float32 in the file; the model's authors wrote the shortest decimal that rounds to it.
        "rms_norm_eps": float(str(np.float32(field("attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(field("rope.freq_base", 10_000.0)),
        "rope_scaling": _rope_scaling(field, reader, head_dim),
    }
    if architecture == "llama":
        config |= _llama_switches(field, reader)
    return config


def _llama_switches(field: Any, reader: GGUFReader) -> dict[str, Any]:
    """The fields that distinguish Mistral from Llama's variants; the other families have no such choices."""
    if sliding_window := field("attention.sliding_window", None):
        return {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": int(sliding_window),
        }
    return {
        "attention_bias": any(tensor.name.endswith("attn_q.bias") for tensor in reader.tensors),
        "mlp_bias": any(tensor.name.endswith("ffn_up.bias") for tensor in reader.tensors),
    }


def _rope_scaling(field: Any, reader: GGUFReader, head_dim: int) -> dict[str, Any] | None:
    """Find the parameters of Llama 3's scaling that give exactly the factors that GGUF stores as a tensor."""
    kind = field("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ValueError(f"rope scaling {kind!r} is not supported")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(field("rope.scaling.factor"))}
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == ROPE_FACTORS), None)
    if factors is None:
        return None
    scaling = RopeScaling(
        kind="llama3",
        factor=float(factors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=LLAMA3_ORIGINAL_WINDOW,
    )
    theta = float(field("rope.freq_base", 10_000.0))
    expected = llama3_factors(head_dim, theta, scaling).numpy()
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ValueError(f"{ROPE_FACTORS} holds factors of an unknown kind of rope scaling")
    return scaling.to_json()
