"""Adapters in PEFT's format: what is read, and what is refused by name before anything is computed with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from shard_server.engines.base import AdapterError
from shard_server.engines.torch_engine.config import LlamaConfig, load_config
from shard_server.engines.torch_engine.lora.peft import (
    MODULES,
    adapter_checksum,
    check_tensor_names,
    module_sizes,
    read_adapter,
    read_peft_config,
)
from shard_server.engines.torch_engine.lora.reader import PeftReader
from tests.fakes.peft_adapter import random_tensors, tensor_name, write_peft_adapter
from tests.fakes.tiny_llama import write_tiny_llama

MAX_RANK = 16
PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def config(model_dir: Path) -> LlamaConfig:
    return load_config(model_dir)


def test_matrices_are_read_and_scaled(model_dir: Path, config: LlamaConfig, tmp_path: Path) -> None:
    """lora_alpha / r is part of what was trained."""
    path = write_peft_adapter(model_dir, tmp_path / "a", rank=4, lora_alpha=8)
    weights = read_adapter(path, config, MAX_RANK)
    tensors = random_tensors(config, 4, MODULES, seed=1, size=0.05)
    assert weights.rank == 4
    assert len(weights.parts) == config.num_layers * len(MODULES)
    for (layer, module), (a, b) in weights.parts.items():
        assert torch.equal(a, tensors[tensor_name(layer, module, "A")])
        assert torch.equal(b, tensors[tensor_name(layer, module, "B")] * 2)
        assert (a.shape[1], b.shape[0]) == module_sizes(config)[module]


def test_rank_stabilised_adapters_are_scaled_by_the_root() -> None:
    """rsLoRA divides lora_alpha by the root of r."""
    assert read_peft_config(PLAIN, MAX_RANK).scale == 2
    assert read_peft_config(PLAIN | {"use_rslora": True}, MAX_RANK).scale == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "biases"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "model's own weights"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": [1]}, "target_modules"),
        ({"r": 0}, "r must be"),
        ({"r": True}, "r must be"),
        ({"r": "8"}, "r must be"),
        ({"r": 17}, "max_adapter_rank is 16"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
    ],
)
def test_what_is_not_computed_as_trained_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    """An adapter that is half applied gives answers that look right and are not."""
    with pytest.raises(AdapterError, match=message):
        read_peft_config(PLAIN | changes, MAX_RANK)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*PLAIN, "use_dora", "bias", "init_lora_weights", "task_type"]), JSON))
def test_no_configuration_makes_the_reader_fail_otherwise(changes: dict[str, Any]) -> None:
    """The files come from anywhere: every fault is an AdapterError."""
    try:
        peft = read_peft_config(PLAIN | changes, MAX_RANK)
    except AdapterError:
        return
    assert 1 <= peft.rank <= MAX_RANK
    assert peft.targets is None or peft.targets <= set(MODULES)


NAMES = st.builds(tensor_name, st.integers(0, 3), st.sampled_from([*MODULES, "lm_head"]), st.sampled_from("ABC"))


@given(st.lists(NAMES | st.text(max_size=20), unique=True))
def test_tensor_names_are_accepted_only_in_whole_pairs_of_this_model(config: LlamaConfig, names: list[str]) -> None:
    """A tensor that is left out, or one without its other half, would be another adapter."""
    try:
        found = check_tensor_names(names, config, None)
    except AdapterError:
        return
    assert set(found) == set(names)
    for (layer, module), _ in found.values():
        assert layer < config.num_layers
        assert {tensor_name(layer, module, "A"), tensor_name(layer, module, "B")} <= set(names)


def _with_tensors(path: Path, changes: dict[str, torch.Tensor | None], tensors: dict[str, torch.Tensor]) -> None:
    merged = tensors | changes
    save_file(
        {name: tensor for name, tensor in merged.items() if tensor is not None}, path / "adapter_model.safetensors"
    )


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (tensor_name(0, "q_proj", "A"), torch.zeros(4, 7), "has shape"),
        (tensor_name(0, "q_proj", "B"), torch.zeros(5, 4), "has shape"),
        (tensor_name(0, "q_proj", "A"), None, "lacks one"),
        (tensor_name(99, "q_proj", "A"), torch.zeros(4, 4), "larger model"),
        ("base_model.model.lm_head.weight", torch.zeros(4, 4), "lm_head"),
        (tensor_name(0, "k_proj", "A"), torch.zeros(4, 4), "k_proj"),  # not among target_modules
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    model_dir: Path, config: LlamaConfig, tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    """They belong to another model, or the file is not what its configuration says."""
    path = write_peft_adapter(model_dir, tmp_path / "a", rank=4, modules=["q_proj"])
    _with_tensors(path, {name: tensor}, random_tensors(config, 4, ["q_proj"], seed=1, size=0.05))
    with pytest.raises(AdapterError, match=message) as caught:
        read_adapter(path, config, MAX_RANK)
    assert str(tmp_path) not in str(caught.value)


def test_numbers_that_are_not_finite_and_types_that_are_not_floats_are_refused(
    model_dir: Path, config: LlamaConfig, tmp_path: Path
) -> None:
    """One NaN makes every answer with the adapter fail."""
    path = write_peft_adapter(model_dir, tmp_path / "a", rank=4, modules=["q_proj"])
    tensors = random_tensors(config, 4, ["q_proj"], seed=1, size=0.05)
    name = tensor_name(0, "q_proj", "A")
    _with_tensors(path, {name: tensors[name] * float("nan")}, tensors)
    with pytest.raises(AdapterError, match="not finite"):
        read_adapter(path, config, MAX_RANK)
    _with_tensors(path, {name: tensors[name].to(torch.int32)}, tensors)
    with pytest.raises(AdapterError, match="I32"):
        read_adapter(path, config, MAX_RANK)


def test_directories_that_hold_no_adapter_are_refused(model_dir: Path, config: LlamaConfig, tmp_path: Path) -> None:
    """Each with what is missing; a pickle is never opened."""
    path = write_peft_adapter(model_dir, tmp_path / "a", rank=4)
    weights = path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AdapterError, match="damaged"):
        read_adapter(path, config, MAX_RANK)
    weights.rename(path / "adapter_model.bin")
    with pytest.raises(AdapterError, match="pickle"):
        read_adapter(path, config, MAX_RANK)
    (path / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match="there is no adapter_model"):
        read_adapter(path, config, MAX_RANK)
    for content in ("[]", "{", json.dumps(PLAIN) + " " * 2**20):
        (path / "adapter_config.json").write_text(content)
        with pytest.raises(AdapterError, match="adapter_config"):
            read_adapter(path, config, MAX_RANK)
    with pytest.raises(AdapterError, match="directory"):
        read_adapter(tmp_path / "none", config, MAX_RANK)


def test_files_that_change_after_their_registration_are_not_loaded(
    model_dir: Path, config: LlamaConfig, tmp_path: Path
) -> None:
    """Routers know the checksum: other weights under it would mix two adapters in one cache."""
    path = write_peft_adapter(model_dir, tmp_path / "a", rank=4)
    reader = PeftReader(config, MAX_RANK, lambda weights: weights.rank)
    info = reader.read("a", str(path))
    assert (info.rank, info.checksum) == (4, adapter_checksum(path))
    assert reader.load(info) == 4
    write_peft_adapter(model_dir, path, rank=4, seed=2)
    with pytest.raises(AdapterError, match="changed"):
        reader.load(info)
