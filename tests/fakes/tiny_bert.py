"""Small random encoders in the layout that real ones come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shard_server.engines.torch_engine.encoder.config import load_encoder_config
from shard_server.engines.torch_engine.encoder.runner import expected_shapes

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 300,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "vocab_size": 320,
    "pad_token_id": 0,
}


def write_tiny_bert(
    model_dir: Path, *, pooling: str = "", max_seq_length: int = 256, prefix: str = "", **changes: Any
) -> Path:
    """A model directory with `TINY_CONFIG` and `changes`, and random float32 weights (always the same). With `pooling`
    ("mean_tokens", ...) it is a sentence model; `prefix` stands before the names of the tensors."""
    model_dir.mkdir(parents=True, exist_ok=True)
    (model_dir / "config.json").write_text(json.dumps(TINY_CONFIG | changes))
    generator = torch.Generator().manual_seed(7)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(load_encoder_config(model_dir)).items():
        scale, shift = (0.1, 1.0) if "LayerNorm.weight" in name else (0.15, 0.0)
        weights[prefix + name] = torch.randn(shape, generator=generator) * scale + shift
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    if pooling:
        kinds = ("Transformer", "Pooling", "Normalize")
        modules = [
            {"type": f"sentence_transformers.models.{kind}", "path": f"{number}_{kind}" if number else ""}
            for number, kind in enumerate(kinds)
        ]
        (model_dir / "modules.json").write_text(json.dumps(modules))
        (model_dir / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))
        (model_dir / "1_Pooling").mkdir(exist_ok=True)
        (model_dir / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return model_dir
