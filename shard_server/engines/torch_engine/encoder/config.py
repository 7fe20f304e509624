"""The config.json of an encoder, checked and in the form that the engine uses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.config import AttentionConfig
from shard_server.engines.torch_engine.config_values import MAX_MESSAGE_CHARS, positive, read_object

ENCODER_TYPES: Final = ("bert", "roberta", "xlm-roberta")


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderConfig:
    """An encoder of learned positions, bidirectional attention, and layer norms behind each addition."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    """Rows of the table of positions."""
    first_position: int
    """The row of a text's first token: RoBERTa's families begin behind the one of padding."""
    num_token_types: int
    layer_norm_eps: float
    is_cross_encoder: bool = False
    """It judges two texts that are one, by a number of its first token."""

    @property
    def attention(self) -> AttentionConfig:
        """That of one layer."""
        return AttentionConfig(1, self.num_heads, self.num_heads, self.hidden_size // self.num_heads, (None,))

    @property
    def max_tokens(self) -> int:
        """The longest text that there are positions for."""
        return self.num_positions - self.first_position


def is_encoder(model_dir: Path) -> bool:
    """True when the model is of one of ENCODER_TYPES. A file that cannot be read is no answer, and others report it."""
    try:
        content = json.loads((model_dir / "config.json").read_bytes())
        return content["model_type"] in ENCODER_TYPES
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def load_encoder_config(model_dir: Path) -> EncoderConfig:
    """Read config.json. Raises EngineError."""
    path = model_dir / "config.json"
    content = read_object(path)
    try:
        _refuse_unsupported(content)
        config = _parse(content)
    except KeyError as error:
        raise EngineError(f"{path}: {error} is missing") from error
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"{path}: {str(error)[:MAX_MESSAGE_CHARS]}") from error
    return config


def _refuse_unsupported(content: dict[str, Any]) -> None:
    if content["model_type"] not in ENCODER_TYPES:
        raise ValueError(f"model type {content['model_type']!r} is no encoder, only {', '.join(ENCODER_TYPES)} are")
    if content.get("hidden_act", "gelu") != "gelu":
        raise ValueError(f"activation {content['hidden_act']!r} is not supported, only 'gelu'")
    if content.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"positions {content['position_embedding_type']!r} are not supported, only 'absolute'")
    if content.get("is_decoder") or content.get("add_cross_attention"):
        raise ValueError("this family is supported as an encoder only")
    if content.get("quantization_config"):
        raise ValueError("quantised weights are not supported")
    if _classifies(content) and _num_labels(content) != 1:
        raise ValueError("a model that classifies texts is supported with one label only, as a cross-encoder")


def _classifies(content: dict[str, Any]) -> bool:
    return any(str(name).endswith("ForSequenceClassification") for name in content.get("architectures") or ())


def _num_labels(content: dict[str, Any]) -> int:
    return content.get("num_labels") or len(content.get("id2label") or (0, 1))


def _parse(content: dict[str, Any]) -> EncoderConfig:
    padding = content.get("pad_token_id")
    if padding is None:
        padding = 1
    config = EncoderConfig(
        model_type=content["model_type"],
        vocab_size=positive(content, "vocab_size"),
        hidden_size=positive(content, "hidden_size"),
        intermediate_size=positive(content, "intermediate_size"),
        num_layers=positive(content, "num_hidden_layers"),
        num_heads=positive(content, "num_attention_heads"),
        num_positions=positive(content, "max_position_embeddings"),
        first_position=0 if content["model_type"] == "bert" else padding + 1,
        num_token_types=positive(content, "type_vocab_size", 2),
        layer_norm_eps=float(content.get("layer_norm_eps", 1e-12)),
        is_cross_encoder=_classifies(content),
    )
    if config.hidden_size % config.num_heads:
        raise ValueError("hidden_size must be a multiple of num_attention_heads")
    if not 0 <= config.first_position < config.num_positions:
        raise ValueError("pad_token_id leaves no positions")
    return config
