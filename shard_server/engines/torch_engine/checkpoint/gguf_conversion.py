"""Converts a GGUF file of a Llama, Mistral, Qwen2 or Qwen3 model into a directory that the engine (and transformers)
loads directly.

GGUF stores quantised blocks, its own tensor names and permuted query/key rows. Converting them once and keeping
plain bf16 safetensors lets an engine start in well under a second.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.gguf_config import (
    ARCHITECTURES,
    EMBEDDINGS,
    OUTPUT,
    GgufFields,
    model_config,
)
from shard_server.engines.torch_engine.checkpoint.gguf_header import check_gguf_header
from shard_server.engines.torch_engine.checkpoint.gguf_tokenizer import build_tokenizer, end_of_sequence_ids

if TYPE_CHECKING:
    from gguf import GGUFReader


def convert_gguf(
    gguf_path: Path,
    out_dir: Path,
    on_progress: Callable[[str], None] | None = None,
    *,
    with_weights: bool = True,
) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json and, if they are wanted, the
    weights (bf16) into `out_dir`, which is created. Raises EngineError when the file cannot be used; `out_dir` may then
    hold part of the files."""
    report = on_progress or (lambda _message: None)
    report(f"reading {gguf_path.name}")
    reader = _open(gguf_path)
    fields = _read_fields(gguf_path, reader)
    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise EngineError(f"{gguf_path}: architecture {architecture!r} is not supported, only {known}")
    try:
        config = model_config(fields, reader)
    except KeyError as error:
        raise EngineError(f"{gguf_path}: metadata {error} is missing") from error
    except (AttributeError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise EngineError(f"{gguf_path}: unusable metadata: {error}") from error
    out_dir.mkdir(parents=True, exist_ok=True)
    report("building the tokenizer")
    tokenizer_config = build_tokenizer(gguf_path, fields, out_dir)
    eos_token_ids = end_of_sequence_ids(fields)
    if with_weights:
        # Imported here because it imports torch, which a conversion without weights does not need.
        from shard_server.engines.torch_engine.checkpoint.gguf_weights import convert_weights

        convert_weights(gguf_path, reader, config, out_dir, report)
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    if len(shapes.get(EMBEDDINGS, ())) != 2:
        raise EngineError(f"{gguf_path}: tensor {EMBEDDINGS!r} is missing")
    config |= {
        "vocab_size": int(shapes[EMBEDDINGS][-1]),
        "tie_word_embeddings": OUTPUT not in shapes,
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
        check_gguf_header(gguf_path)
        return gguf.GGUFReader(gguf_path)
    except OSError as error:
        raise EngineError(f"{gguf_path}: {error.strerror or error}") from error
    # The reader trusts its input: depending on the bad length or offset, a damaged file raises any of these.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise EngineError(f"{gguf_path}: not a GGUF file, or a damaged or truncated one ({error})") from error


def _read_fields(gguf_path: Path, reader: GGUFReader) -> GgufFields:
    try:
        return {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, TypeError) as error:
        raise EngineError(f"{gguf_path}: damaged metadata ({error})") from error
