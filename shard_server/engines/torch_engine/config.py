"""The config.json of a Llama-family model, checked and in the form that the engine uses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.config_values import MAX_MESSAGE_CHARS, positive, read_object
from shard_server.engines.torch_engine.rope import RopeScaling

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_QWEN = ("qwen2", "qwen3")
_DEFAULT_SLIDING_WINDOW = 4096
"""The window if a file leaves it out; a model without a window says null."""
_DEFAULT_MAX_WINDOW_LAYERS = 28
"""Qwen's number of leading layers without a window, if a file does not say."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The sizes of a model's attention."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_windows: tuple[int | None, ...]
    """By layer: the largest number of tokens that a token sees, including itself (sliding-window attention). None:
    all."""

    @property
    def num_heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """The size of the keys of one token, and of its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def one_layer(self) -> AttentionConfig:
        """A layer without a window."""
        return AttentionConfig(1, self.num_heads, self.num_kv_heads, self.head_dim, (None,))


@dataclasses.dataclass(frozen=True, slots=True)
class LlamaConfig(AttentionConfig):
    """A decoder of RMSNorm, rotary grouped-query attention and a SwiGLU MLP: Llama, Mistral, Qwen2, Qwen3."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qk_norm: bool
    """Queries and keys are normalised head by head before they are rotated."""
    qkv_bias: bool
    output_bias: bool
    """True when the attention's output projection has a bias."""
    mlp_bias: bool
    eos_token_ids: frozenset[int]


def load_config(model_dir: Path) -> LlamaConfig:
    """Read config.json, and the end-of-sequence ids of generation_config.json if there is one. Raises EngineError."""
    path = model_dir / "config.json"
    content = read_object(path)
    generation_path = model_dir / "generation_config.json"
    generation = read_object(generation_path) if generation_path.exists() else {}
    try:
        _refuse_unsupported(content)
        config = _parse(content, generation)
    except KeyError as error:
        raise EngineError(f"{path}: {error} is missing") from error
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"{path}: {str(error)[:MAX_MESSAGE_CHARS]}") from error
    return config


def _refuse_unsupported(content: dict[str, Any]) -> None:
    if content["model_type"] not in MODEL_TYPES:
        raise ValueError(f"model type {content['model_type']!r} is not supported, only {', '.join(MODEL_TYPES)}")
    if content.get("hidden_act", "silu") != "silu":
        raise ValueError(f"activation {content['hidden_act']!r} is not supported, only 'silu'")
    if content.get("quantization_config"):
        raise ValueError("quantised weights are not supported")
    if content.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rotary embedding of a part of the head is not supported")


def _parse(content: dict[str, Any], generation: dict[str, Any]) -> LlamaConfig:
    model_type = content["model_type"]
    num_heads = positive(content, "num_attention_heads")
    hidden_size = positive(content, "hidden_size")
    # If a file leaves out the size of a head, the family's default applies.
    default_head_dim = 128 if model_type == "qwen3" else hidden_size // num_heads
    # The Mistral and Qwen2 families have no such switches: their biases are part of the architecture.
    attention_bias = model_type in ("llama", "qwen3") and bool(content.get("attention_bias", False))
    rope = content.get("rope_parameters") or {}
    config = LlamaConfig(
        model_type=model_type,
        vocab_size=positive(content, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(content, "intermediate_size"),
        num_layers=positive(content, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=positive(content, "num_key_value_heads", num_heads),
        head_dim=positive(content, "head_dim", default_head_dim),
        max_position_embeddings=positive(content, "max_position_embeddings"),
        rms_norm_eps=float(content["rms_norm_eps"]),
        rope_theta=float(content.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        rope_scaling=_parse_rope_scaling(content.get("rope_scaling") or rope),
        tie_word_embeddings=bool(content.get("tie_word_embeddings", False)),
        qk_norm=model_type == "qwen3",
        layer_windows=_layer_windows(content),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=model_type == "llama" and bool(content.get("mlp_bias", False)),
        eos_token_ids=_token_ids(generation.get("eos_token_id", content.get("eos_token_id"))),
    )
    if config.num_heads % config.num_kv_heads:
        raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
    if config.head_dim % 2:
        raise ValueError("head_dim must be even")
    return config


def _layer_windows(content: dict[str, Any]) -> tuple[int | None, ...]:
    num_layers = positive(content, "num_hidden_layers")
    window = _sliding_window(content)
    # One that no sequence outgrows is none.
    if window is None or window >= positive(content, "max_position_embeddings"):
        return (None,) * num_layers
    kinds = content.get("layer_types")
    if content["model_type"] == "mistral":
        if kinds is not None and set(kinds) != {_SLIDING}:
            raise ValueError("layer_types is not supported for this family: all layers have the window")
        return (window,) * num_layers
    if kinds is None:
        num_full = content.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        kinds = [_FULL if layer < num_full else _SLIDING for layer in range(num_layers)]
    if len(kinds) != num_layers or not {_FULL, _SLIDING}.issuperset(kinds):
        raise ValueError(f"layer_types must say {_FULL!r} or {_SLIDING!r} for each of {num_layers} layers")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _sliding_window(content: dict[str, Any]) -> int | None:
    """None without one. Llama has none; Qwen has one only when it is switched on."""
    model_type = content["model_type"]
    if model_type == "llama" or (model_type in _QWEN and not content.get("use_sliding_window", False)):
        return None
    if content.get("sliding_window", _DEFAULT_SLIDING_WINDOW) is None:
        return None
    return positive(content, "sliding_window", _DEFAULT_SLIDING_WINDOW)


def _parse_rope_scaling(content: dict[str, Any]) -> RopeScaling | None:
    kind = content.get("rope_type", content.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(content["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=float(content["factor"]),
            low_freq_factor=float(content["low_freq_factor"]),
            high_freq_factor=float(content["high_freq_factor"]),
            original_max_position_embeddings=int(content["original_max_position_embeddings"]),
        )
    raise ValueError(f"rope scaling {kind!r} is not supported")


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    token_ids = [value] if isinstance(value, int) else value
    if not isinstance(token_ids, list) or not all(isinstance(token_id, int) for token_id in token_ids):
        raise ValueError("eos_token_id must be an integer or a list of integers")
    return frozenset(token_ids)
