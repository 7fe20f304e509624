"""Reads a LoRA adapter in PEFT's directory format: adapter_config.json and adapter_model.safetensors.

What cannot be computed exactly as it was trained is refused by name. The files come from anywhere: sizes are bounded,
and nothing of them is executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from shard_server.engines.base import AdapterError, EngineError
from shard_server.engines.torch_engine.config import LlamaConfig
from shard_server.engines.torch_engine.config_values import MAX_MESSAGE_CHARS, read_object

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
PICKLE_FILE: Final = "adapter_model.bin"
MAX_CONFIG_BYTES: Final = 2**20
MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder layer that adapters can change, by their names in config.json's target_modules."""
_DTYPES: Final = ("BF16", "F16", "F32")
_TENSOR: Final = re.compile(
    r"base_model\.model\.model\.layers\.(\d{1,4})\.(?:self_attn|mlp)\.(\w{1,16})\.lora_(A|B)\.weight"
)
_REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "fan_in_fan_out": "fan_in_fan_out",
    "lora_bias": "biases (lora_bias)",
    "modules_to_save": "modules_to_save",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "layer_replication": "layer_replication",
    "target_parameters": "target_parameters",
    "trainable_token_indices": "trainable_token_indices",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow",
}
"""Keys of adapter_config.json that change what is computed, and what they stand for."""
_OTHER_BASES: Final = ("pissa", "olora", "corda", "loftq", "eva")
"""Initialisations that also change the model's own weights, which the adapter's directory does not have."""

Part = tuple[int, str]
"""A layer and one of MODULES."""


@dataclasses.dataclass(frozen=True, slots=True)
class PeftConfig:
    """Holds what adapter_config.json says."""

    rank: int
    scale: float
    """The factor of B A x."""
    targets: frozenset[str] | None
    """Some of MODULES; None: whichever have tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoraWeights:
    """The matrices of an adapter, float32: W x becomes W x + B A x."""

    rank: int
    parts: Mapping[Part, tuple[torch.Tensor, torch.Tensor]]
    """A [rank, in_features] and B [out_features, rank], already scaled."""


def read_peft_config(content: Mapping[str, Any], max_rank: int) -> PeftConfig:
    """Raises AdapterError."""
    if content.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type is {_shown(content.get('peft_type'))}, only 'LORA' is supported")
    if content.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterError(f"task_type is {_shown(content['task_type'])}, only 'CAUSAL_LM' is supported")
    for key, what in _REFUSED.items():
        if content.get(key):
            raise AdapterError(f"{what} is not supported")
    if content.get("bias", "none") != "none":
        raise AdapterError(f"bias is {_shown(content['bias'])}: trained biases are not supported")
    initial = content.get("init_lora_weights", True)
    if isinstance(initial, str) and initial.lower().startswith(_OTHER_BASES):
        raise AdapterError(f"init_lora_weights is {_shown(initial)}: it changes the model's own weights")
    rank, alpha = content.get("r"), content.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"r must be a positive integer, not {_shown(rank)}")
    if rank > max_rank:
        raise AdapterError(f"its rank is {rank}, and model.max_adapter_rank is {max_rank}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise AdapterError(f"lora_alpha must be a number, not {_shown(alpha)}")
    divisor = math.sqrt(rank) if content.get("use_rslora") else rank
    return PeftConfig(rank, alpha / divisor, _targets(content.get("target_modules")))


def _targets(wanted: Any) -> frozenset[str] | None:
    if wanted is None or isinstance(wanted, str):  # an expression: the tensors show what it has found
        return None
    if not isinstance(wanted, list) or not wanted or not all(isinstance(name, str) for name in wanted):
        raise AdapterError("target_modules must be a list of names, or an expression")
    names = frozenset(name.rpartition(".")[2] for name in wanted)
    unknown = sorted(names.difference(MODULES))
    if unknown:
        raise AdapterError(f"target_modules has {_shown(unknown[0])}, only {', '.join(MODULES)} are supported")
    return names


def module_sizes(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """in_features and out_features of each of MODULES."""
    hidden, inner, query, kv = config.hidden_size, config.intermediate_size, config.query_size, config.kv_size
    sizes = (
        (hidden, query),
        (hidden, kv),
        (hidden, kv),
        (query, hidden),
        (hidden, inner),
        (hidden, inner),
        (inner, hidden),
    )
    return dict(zip(MODULES, sizes, strict=True))


def check_tensor_names(
    names: Iterable[str], config: LlamaConfig, targets: frozenset[str] | None
) -> dict[str, tuple[Part, str]]:
    """By tensor name: which matrix ("A" or "B") of which part it is. Raises AdapterError for others, and for a part
    that lacks one of its two."""
    found: dict[str, tuple[Part, str]] = {}
    seen: dict[Part, set[str]] = {}
    for name in names:
        match = _TENSOR.fullmatch(name)
        if match is None or match[2] not in MODULES or (targets is not None and match[2] not in targets):
            raise AdapterError(f"tensor {_shown(name)} is not supported")
        if int(match[1]) >= config.num_layers:
            raise AdapterError(
                f"tensor {_shown(name)} belongs to a larger model: this one has {config.num_layers} layers"
            )
        part = int(match[1]), match[2]
        found[name] = part, match[3]
        seen.setdefault(part, set()).add(match[3])
    if not found:
        raise AdapterError(f"{WEIGHTS_FILE} has no tensors")
    for (layer, module), matrices in seen.items():
        if len(matrices) < 2:
            raise AdapterError(f"layer {layer}: {module} lacks one of its two matrices")
    missing = (targets or frozenset()).difference(module for _, module in seen)
    if missing:
        raise AdapterError(f"target_modules names {min(missing)}, which has no tensors")
    return found


def read_adapter(path: Path, config: LlamaConfig, max_rank: int) -> LoraWeights:
    """Read the whole adapter. Raises AdapterError, whose message names no directory."""
    peft = read_peft_config(_config_of(path), max_rank)
    file_path = path / WEIGHTS_FILE
    if not file_path.is_file():
        if (path / PICKLE_FILE).exists():
            raise AdapterError(f"{PICKLE_FILE} is a pickle, which can run code: save the adapter as {WEIGHTS_FILE}")
        raise AdapterError(f"there is no {WEIGHTS_FILE}")
    tensors: dict[Part, dict[str, torch.Tensor]] = {}
    sizes = module_sizes(config)
    try:
        with safe_open(file_path, framework="pt") as file:
            names = check_tensor_names(file.keys(), config, peft.targets)
            for name, (part, matrix) in names.items():
                header = file.get_slice(name)
                num_in, num_out = sizes[part[1]]
                expected = (peft.rank, num_in) if matrix == "A" else (num_out, peft.rank)
                if tuple(header.get_shape()) != expected:
                    shape = tuple(header.get_shape())
                    raise AdapterError(f"tensor {_shown(name)} has shape {shape}, this model and r imply {expected}")
                if header.get_dtype() not in _DTYPES:
                    raise AdapterError(f"tensor {_shown(name)} has type {header.get_dtype()}, not {', '.join(_DTYPES)}")
                tensor = file.get_tensor(name).to(torch.float32, copy=True)
                if not bool(torch.isfinite(tensor).all()):
                    raise AdapterError(f"tensor {_shown(name)} has numbers that are not finite")
                tensors.setdefault(part, {})[matrix] = tensor
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} is damaged or cannot be read: {str(error)[:MAX_MESSAGE_CHARS]}") from error
    parts = {part: (both["A"], both["B"].mul_(peft.scale)) for part, both in sorted(tensors.items())}
    return LoraWeights(peft.rank, parts)


def adapter_checksum(path: Path) -> str:
    """The SHA-256 of a listing of both files, as `sha256sum` prints it. Raises AdapterError."""
    listing = ""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            with (path / name).open("rb") as file:
                listing += f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n"
        except OSError as error:
            raise AdapterError(f"{name} cannot be read: {error.strerror or error}") from error
    return hashlib.sha256(listing.encode()).hexdigest()


def _config_of(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    if not file.is_file():
        raise AdapterError(f"there is no {CONFIG_FILE}: the path must be a directory in PEFT's format")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG_FILE} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        return read_object(file)
    except EngineError as error:
        raise AdapterError(f"{CONFIG_FILE} is not a JSON object") from error


def _shown(value: Any) -> str:
    return repr(value)[:200]
