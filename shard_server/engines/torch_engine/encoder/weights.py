"""Reads an encoder's tensors. Files name them with or without the family before them, and hold heads for other uses."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.weights import OnProgress, load_tensors
from shard_server.engines.torch_engine.encoder.config import EncoderConfig

_FAMILY_PREFIXES: Final = ("bert.", "roberta.")
_LEFT_OUT: Final = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids", "embeddings.token_type_ids")
"""Heads for other uses, and tables that follow from the configuration."""


def load_encoder_weights(
    model_dir: Path, config: EncoderConfig, on_progress: OnProgress = lambda _message: None
) -> dict[str, torch.Tensor]:
    """The tensors by their names without the family, mapped rather than read. Raises EngineError."""
    check = functools.partial(_check_left_out, model_dir, config)
    return load_tensors(model_dir, expected_shapes(config), check, on_progress, _without_family)


def expected_shapes(config: EncoderConfig) -> Mapping[str, tuple[int, ...]]:
    """The shape of every tensor that is used, by its name without the family."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.num_positions, hidden),
        "embeddings.token_type_embeddings.weight": (config.num_token_types, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    linears = {
        "attention.self.query": (hidden, hidden),
        "attention.self.key": (hidden, hidden),
        "attention.self.value": (hidden, hidden),
        "attention.output.dense": (hidden, hidden),
        "intermediate.dense": (inner, hidden),
        "output.dense": (hidden, inner),
    }
    for layer in range(config.num_layers):
        prefix = f"encoder.layer.{layer}"
        for name, (rows, columns) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            shapes[f"{prefix}.{name}.bias"] = (rows,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{prefix}.{name}.weight"] = shapes[f"{prefix}.{name}.bias"] = (hidden,)
    return shapes


def _without_family(name: str) -> str:
    for prefix in _FAMILY_PREFIXES:
        name = name.removeprefix(prefix)
    # The names of TensorFlow, in old files.
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _check_left_out(model_dir: Path, config: EncoderConfig, name: str) -> None:
    """Raise EngineError for a tensor that the computation would ignore: it belongs to a different model."""
    if not name.startswith(_LEFT_OUT):
        raise EngineError(f"{model_dir}: unexpected tensor {name!r}: a {config.model_type} model has none of that name")
