"""The files in which a converted model keeps its quantised weights as they are: beside the bf16 ones, in the format of
safetensors under another suffix, so that nothing else takes their tensors for the model's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.weights import expected_shapes, opened
from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.grouped_weight import GROUP, GroupedWeight
from shard_server.engines.torch_engine.weight_form import PackedFiles

PACKED_STEM, PACKED_SUFFIX = "packed", ".weights"
_WORDS: Final = {4: "words4", 8: "words8"}
"""The part of a tensor's name that says the bits"""


def packed_parts(name: str, weight: GroupedWeight) -> dict[str, torch.Tensor]:
    """The tensors that a file holds for one weight."""
    minima = {} if weight.minima is None else {f"{name}.minima": weight.minima}
    return {f"{name}.{_WORDS[weight.bits]}": weight.words, f"{name}.scales": weight.scales, **minima}


def _packed_files(model_dir: Path) -> list[Path]:
    """None of them if the model has no packed weights."""
    return sorted(model_dir.glob(f"{PACKED_STEM}*{PACKED_SUFFIX}"))


def find_packed(model_dir: Path, config: LlamaConfig) -> PackedFiles:
    """Finds what there is, by the files' headers. Raises EngineError."""
    packed: set[str] = set()
    files = _packed_files(model_dir)
    for path in files:
        with opened(path) as file:
            packed |= {name.removesuffix(".scales") for name in file.keys()}  # noqa: SIM118  (not a dict)
    is_whole = packed.issuperset(multiplied_names(config))
    return PackedFiles(bool(files), is_whole, sum(path.stat().st_size for path in files))


def multiplied_names(config: LlamaConfig) -> Iterable[str]:
    """The names of the matrices that a step multiplies with."""
    for name, shape in expected_shapes(config).items():
        is_looked_up = name == "model.embed_tokens.weight" and not config.tie_word_embeddings
        if len(shape) == 2 and not is_looked_up:
            yield name


def load_packed(model_dir: Path, config: LlamaConfig) -> dict[str, GroupedWeight]:
    """The packed weights by their names, mapped rather than read. Raises EngineError."""
    found: dict[str, GroupedWeight] = {}
    shapes = expected_shapes(config)
    for path in _packed_files(model_dir):
        with opened(path) as file:
            names = set(file.keys())
            for bits, part in _WORDS.items():
                for name in (whole.removesuffix(f".{part}") for whole in names if whole.endswith(f".{part}")):
                    minima = file.get_tensor(f"{name}.minima") if f"{name}.minima" in names else None
                    words, scales = file.get_tensor(f"{name}.{part}"), file.get_tensor(f"{name}.scales")
                    found[name] = _checked(path, name, shapes.get(name), GroupedWeight(bits, words, scales, minima))
    return found


def _checked(path: Path, name: str, shape: tuple[int, ...] | None, weight: GroupedWeight) -> GroupedWeight:
    """Raises EngineError unless the parts are those of a matrix of that shape."""
    parts = [(weight.words, torch.int32), (weight.scales, torch.float16)]
    if weight.minima is not None:
        parts.append((weight.minima, torch.float16))
    if shape is not None and len(shape) == 2 and all(part.dtype == dtype and part.ndim == 2 for part, dtype in parts):
        rows, columns = shape
        groups = columns // GROUP
        sizes = {tuple(part.shape) for part, _ in parts[2:]}
        are_right = (
            columns % GROUP == 0
            and tuple(weight.words.shape) == (rows, columns * weight.bits // 32)
            and tuple(weight.scales.shape) in ((rows, groups), (rows, 2 * groups))
            and sizes <= {(rows, groups)}
        )
        if are_right:
            return weight
    raise EngineError(f"{path}: the packed tensor {name!r} has the wrong shape or type")
