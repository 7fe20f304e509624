"""The bytes that a decoding step reads and the operations that a prompt takes, computed from a model's config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from shard_server.engines.torch_engine.checkpoint.weights import expected_shapes
from shard_server.engines.torch_engine.config import LlamaConfig

BYTES_PER_WEIGHT: Final = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0}
"""By format of the linear layers. Scales are left out: they are below 1% of the weights."""


def num_layer_weights(config: LlamaConfig) -> int:
    """The weights of all linear layers, without the head."""
    shapes = expected_shapes(config)
    return sum(rows * columns for name, (rows, *rest) in shapes.items() if ".layers." in name for columns in rest)


def num_head_weights(config: LlamaConfig) -> int:
    """The weights of the head, which may be those of the embedding."""
    return config.vocab_size * config.hidden_size


def decode_step_bytes(
    config: LlamaConfig, context_lengths: Sequence[float], bytes_per_weight: float, bytes_per_kv_number: float
) -> float:
    """The bytes that a step must read if each sequence gets one token: all weights once, and the keys and values that
    each sequence sees. `context_lengths` are in tokens, one per sequence. Activations and norms are left out."""
    num_weights = num_layer_weights(config) + num_head_weights(config)
    num_seen = sum(_num_seen(window, length) for window in config.layer_windows for length in context_lengths)
    return bytes_per_weight * num_weights + bytes_per_kv_number * 2 * config.kv_size * num_seen


def decode_step_operations(config: LlamaConfig, context_lengths: Sequence[float]) -> float:
    """The floating-point operations of the same step."""
    num_weights = num_layer_weights(config) + num_head_weights(config)
    num_pairs = sum(_num_seen(window, length) for window in config.layer_windows for length in context_lengths)
    return 2 * num_weights * len(context_lengths) + 4 * config.query_size * num_pairs


def prefill_operations(config: LlamaConfig, num_tokens: int, num_logit_rows: int = 1) -> float:
    """The floating-point operations of a prompt: the linear layers for every token, the head for `num_logit_rows`, and
    in each layer scores and weighted sums for the pairs of tokens that see each other."""
    linear = 2 * (num_layer_weights(config) * num_tokens + num_head_weights(config) * num_logit_rows)
    return linear + 4 * config.query_size * sum(_num_pairs(window, num_tokens) for window in config.layer_windows)


def _num_seen(window: int | None, length: float) -> float:
    return length if window is None else min(length, window)


def _num_pairs(window: int | None, num_tokens: int) -> int:
    """The pairs of a token and a token that it sees, which may be itself."""
    width = num_tokens if window is None else min(window, num_tokens)
    return width * (width + 1) // 2 + (num_tokens - width) * width
