"""Checks the files of a LoRA adapter before TensorRT-LLM sees them.

The library loads an adapter inside its executor, where one that cannot be loaded ends the engine. So everything that
can be seen in the files is compared with the model's: names, shapes and types of all matrices. Only headers are read,
and the whole once for the checksum; nothing of the files is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from safetensors import SafetensorError, safe_open

from kvloom_common.text.model_checksum import ChecksumError, model_checksum
from shard_server.engines.base import AdapterError, AdapterInfo

WEIGHTS: Final = "adapter_model.safetensors"
MODULES: Final[Mapping[str, str]] = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "down_proj": "mlp_4h_to_h",
}
"""TensorRT-LLM's names of a model's modules. Those of others are not compared with `lora_target_modules`."""
_TENSOR: Final = re.compile(r"base_model\.model\.(.{1,400}\.(\w{1,64}))\.lora_(A|B)\.weight")
_FLOATS: Final = ("BF16", "F16", "F32")
_UNPACKED: Final = (*_FLOATS, "F8_E4M3", "F8_E5M2")
"""Types with one number for each weight: those of other weights say nothing of the module's size."""


class _Matrix(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


class AdapterCheck(NamedTuple):
    """The model, and what its adapters may be. `target_modules` are the library's names; empty: any."""

    model_dir: Path
    max_rank: int
    target_modules: frozenset[str]

    def read(self, name: str, path: str) -> AdapterInfo:
        """Check an adapter and describe it. Raises AdapterError, whose message says what is wrong."""
        directory = Path(path)
        if not directory.is_dir():
            raise AdapterError("there is no such directory")
        rank = self._check_config(directory)
        self._check_weights(directory, rank)
        try:
            return AdapterInfo(name, path, model_checksum(directory), rank)
        except ChecksumError as error:
            raise AdapterError("its files cannot be read") from error

    def _check_config(self, directory: Path) -> int:
        """The rank."""
        try:
            content = json.loads((directory / "adapter_config.json").read_bytes())
            rank = int(content["r"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise AdapterError("adapter_config.json is missing or damaged, or the files cannot be read") from error
        if not 1 <= rank <= self.max_rank:
            raise AdapterError(f"its rank is {rank}, and lora_config.max_lora_rank is {self.max_rank}")
        if content.get("modules_to_save"):
            raise AdapterError("modules_to_save is not supported: it replaces weights of the model")
        return rank

    def _check_weights(self, directory: Path, rank: int) -> None:
        if not (directory / WEIGHTS).is_file():
            raise AdapterError(f"there is no {WEIGHTS}")
        matrices = dict(_headers(directory / WEIGHTS))
        if not matrices:
            raise AdapterError(f"{WEIGHTS} has no tensors")
        sizes = _module_sizes(self.model_dir)
        found: dict[str, set[str]] = {}
        for tensor, matrix in matrices.items():
            match = _TENSOR.fullmatch(tensor)
            if match is None:
                raise AdapterError(f"tensor {tensor[:200]!r} is no matrix of a LoRA adapter")
            module, kind, letter = match.groups()
            found.setdefault(module, set()).add(letter)
            target = MODULES.get(kind)
            if target is not None and self.target_modules and target not in self.target_modules:
                raise AdapterError(f"it changes {kind}, and lora_config.lora_target_modules lacks {target}")
            if matrix.dtype not in _FLOATS:
                raise AdapterError(f"tensor {tensor!r} has the type {matrix.dtype}, not {', '.join(_FLOATS)}")
            _check_shape(tensor, letter, matrix.shape, rank, _size_of(sizes, module) if sizes else None)
        halves = [module for module, letters in found.items() if len(letters) < 2]
        if halves:
            raise AdapterError(f"{min(halves)} lacks one of its two matrices")


def _check_shape(tensor: str, letter: str, shape: tuple[int, ...], rank: int, size: tuple[int, int] | None) -> None:
    """`size` is (outputs, inputs) of the module; None: it is not known."""
    own, other = (0, 1) if letter == "A" else (1, 0)
    expected = None if size is None else (rank, size[1]) if letter == "A" else (size[0], rank)
    if len(shape) != 2 or shape[own] != rank or (expected is not None and shape != expected):
        wanted = expected or f"{rank} at {own}, anything at {other}"
        raise AdapterError(f"tensor {tensor!r} has the shape {shape}; this model and the rank imply {wanted}")


def _headers(path: Path) -> Iterator[tuple[str, _Matrix]]:
    """The tensors of a file, without their content. Raises AdapterError."""
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                header: Any = file.get_slice(name)
                yield name, _Matrix(tuple(header.get_shape()), str(header.get_dtype()))
    except (OSError, SafetensorError, ValueError) as error:
        raise AdapterError(f"{path.name} is damaged or cannot be read") from error


def _module_sizes(model_dir: Path) -> dict[str, tuple[int, int] | None]:
    """(outputs, inputs) of the model's modules by name, None for a packed one; empty if it has no safetensors."""
    found: dict[str, tuple[int, int] | None] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        for name, matrix in _headers(path):
            if name.endswith(".weight") and len(matrix.shape) == 2:
                is_plain = matrix.dtype in _UNPACKED
                found[name.removesuffix(".weight")] = (matrix.shape[0], matrix.shape[1]) if is_plain else None
    return found


def _size_of(sizes: Mapping[str, tuple[int, int] | None], module: str) -> tuple[int, int] | None:
    """None: not known. Raises AdapterError for a module that the model does not have."""
    if module in sizes:
        return sizes[module]
    _, _, tail = module.partition("layers.")  # checkpoints may name the parts around the layers otherwise
    alike = [name for name in sizes if tail and name.endswith(f"layers.{tail}")]
    if not alike:
        raise AdapterError(f"it changes {module}, which this model does not have")
    return sizes[alike[0]] if len(alike) == 1 else None
