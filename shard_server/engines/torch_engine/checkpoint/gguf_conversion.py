"""Converts a GGUF file of a Llama, Mistral, Qwen2 or Qwen3 model into a directory that the engine (and transformers)
loads directly.

GGUF stores quantised blocks, its own tensor names and permuted query/key rows. Converting them once and keeping
plain bf16 safetensors lets an engine start in well under a second.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import gguf

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.gguf_config import (
    ARCHITECTURES,
    EMBEDDINGS,
    OUTPUT,
    GgufFields,
    model_config,
)
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


_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALAR_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""By value type."""
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_DIMENSIONS: Final = 4
_MAX_ENTRIES: Final = 100_000
"""A file has at most so many entries of metadata, and so many tensors; models have hundreds."""
_MAX_ELEMENTS: Final = 4_000_000
"""An array has at most so many elements; the longest ones are vocabularies and their merges."""
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")


def check_gguf_header(path: Path) -> None:
    """Raises ValueError, and OSError."""
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Walk(content).check()


class _Walk:
    """Reads from the beginning of the file to the end of its header."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._size = len(content)
        self._at = len(_MAGIC)

    def check(self) -> None:
        version = self._number(_U32)
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported")
        num_tensors = self._count("tensors", _MAX_ENTRIES)
        num_entries = self._count("metadata entries", _MAX_ENTRIES)
        for _ in range(num_entries):
            self._skip_string()
            self._skip_value(self._number(_U32))
        for _ in range(num_tensors):
            self._skip_string()
            num_dimensions = self._number(_U32)
            if num_dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {num_dimensions} dimensions")
            self._skip(8 * num_dimensions + 4 + 8)  # the dimensions, the type and the offset

    def _number(self, form: struct.Struct) -> int:
        start = self._at
        self._skip(form.size)
        return form.unpack_from(self._content, start)[0]

    def _count(self, what: str, largest: int) -> int:
        count = self._number(_U64)
        if count > largest:
            raise ValueError(f"it claims {count} {what}")
        return count

    def _skip(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > self._size:
            raise ValueError("it ends within its header")

    def _skip_string(self) -> None:
        self._skip(self._number(_U64))

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            self._skip_array()
        elif kind in _SCALAR_BYTES:
            self._skip(_SCALAR_BYTES[kind])
        else:
            raise ValueError(f"a value has the unknown type {kind}")

    def _skip_array(self) -> None:
        kind = self._number(_U32)
        count = self._count("elements of an array", _MAX_ELEMENTS)
        if kind in _SCALAR_BYTES:
            self._skip(count * _SCALAR_BYTES[kind])
        elif kind == _STRING:
            for _ in range(count):
                self._skip_string()
        else:
            raise ValueError(f"an array has elements of type {kind}")
