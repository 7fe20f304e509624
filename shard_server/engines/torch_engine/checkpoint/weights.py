"""Reads a model's safetensors files and checks that every tensor is there, with the shape its config.json implies.

Names, shapes and types are in the files' headers: everything is checked, and the memory computed, before the first
weight is read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.config import LlamaConfig

_DTYPES = ("BF16", "F16", "F32")
_DERIVED_TENSORS = ("rotary_emb.inv_freq", "masked_bias")
"""Old files hold these tables, which can be computed from config.json."""

OnProgress = Callable[[str], None]


def load_weights(
    model_dir: Path, config: LlamaConfig, on_progress: OnProgress = lambda _message: None
) -> dict[str, torch.Tensor]:
    """The tensors by their names in the files, mapped rather than read. Raises EngineError."""
    check_ignorable = functools.partial(_check_ignorable, model_dir, config)
    return load_tensors(model_dir, expected_shapes(config), check_ignorable, on_progress)


def load_tensors(
    model_dir: Path,
    expected: Mapping[str, tuple[int, ...]],
    check_ignorable: Callable[[str], None],
    on_progress: OnProgress,
    canonical: Callable[[str], str] = str,
) -> dict[str, torch.Tensor]:
    """The expected tensors, mapped rather than read. `canonical` turns a name in the files into the expected one.
    Raises EngineError, as does `check_ignorable` for the name of another tensor that must not be left out."""
    places = _check_headers(model_dir, expected, check_ignorable, canonical)
    paths = sorted({path for path, _ in places.values()})
    weights: dict[str, torch.Tensor] = {}
    for number, path in enumerate(paths, 1):
        on_progress(f"weights: file {number} of {len(paths)}, {path.name}")
        with opened(path) as file:
            for name, (place, stored_name) in places.items():
                if place == path:
                    weights[name] = file.get_tensor(stored_name)
    return weights


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model with this configuration, by its name in the file."""
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
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.{name}.weight": (size,) for name, size in norms.items()}
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    return shapes


def weight_bytes(config: LlamaConfig, dtype: torch.dtype, *, bits: float | None = None) -> int:
    """The memory of the loaded weights in bytes. A tied embedding counts twice, because the head has a layout of its
    own. `bits`: of each weight of the linear layers and the head, but not of the embedding; None: those of `dtype`."""
    embedding_size = config.vocab_size * config.hidden_size
    num_weights = sum(math.prod(shape) for shape in expected_shapes(config).values())
    if config.tie_word_embeddings:
        num_weights += embedding_size
    if bits is not None:
        return embedding_size * dtype.itemsize + round((num_weights - embedding_size) * bits / 8)
    return num_weights * dtype.itemsize


def weight_files(model_dir: Path) -> list[Path]:
    """The files of the index if there is one, else every .safetensors file. Raises EngineError when there are none."""
    index_path = model_dir / "model.safetensors.index.json"
    if index_path.exists():
        try:
            names = set(json.loads(index_path.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise EngineError(f"{index_path}: damaged ({error})") from error
        # The index is untrusted input: its names must not lead out of the directory.
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise EngineError(f"{index_path}: damaged (weight_map must name files beside it)")
        return [model_dir / name for name in sorted(names)]
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{model_dir}: no .safetensors file in it")
    return files


def _check_headers(
    model_dir: Path,
    expected: Mapping[str, tuple[int, ...]],
    check_ignorable: Callable[[str], None],
    canonical: Callable[[str], str],
) -> dict[str, tuple[Path, str]]:
    """The file of every expected tensor, and its name there."""
    places: dict[str, tuple[Path, str]] = {}
    for path in weight_files(model_dir):
        with opened(path) as file:
            for stored_name in file.keys():  # noqa: SIM118  (not a dict)
                name = canonical(stored_name)
                if name not in expected:
                    check_ignorable(name)
                    continue
                if name in places:
                    raise EngineError(f"{model_dir}: tensor {name!r} is in {places[name][0].name} and in {path.name}")
                header = file.get_slice(stored_name)
                _check_tensor(model_dir, name, tuple(header.get_shape()), header.get_dtype(), expected[name])
                places[name] = path, stored_name
    missing = sorted(expected.keys() - places.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise EngineError(f"{model_dir}: tensor {missing[0]!r}{more} missing")
    return places


def _check_tensor(
    model_dir: Path, name: str, shape: tuple[int, ...], dtype: str, expected_shape: tuple[int, ...]
) -> None:
    if shape != expected_shape:
        raise EngineError(f"{model_dir}: tensor {name!r} has shape {shape}, config.json implies {expected_shape}")
    if dtype not in _DTYPES:
        raise EngineError(
            f"{model_dir}: tensor {name!r} has type {dtype}, which is not supported, only {', '.join(_DTYPES)}"
        )


def _check_ignorable(model_dir: Path, config: LlamaConfig, name: str) -> None:
    """Raise EngineError for a tensor that the computation would ignore: it belongs to a different model."""
    tied_head = config.tie_word_embeddings and name == "lm_head.weight"
    if not tied_head and not name.endswith(_DERIVED_TENSORS):
        raise EngineError(f"{model_dir}: unexpected tensor {name!r}: a {config.model_type} model has none of that name")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise EngineError(f"{path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise EngineError(f"{path}: not a safetensors file, or a damaged or truncated one ({error})") from error
