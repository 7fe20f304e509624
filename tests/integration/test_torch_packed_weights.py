"""Quantised blocks of GGUF files stay what they are: in the converted directory, and in what a step computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from kvloom_common.text.model_checksum import model_checksum
from lab.damaged_model import damage
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.gguf_blocks import grouped_weight
from shard_server.engines.torch_engine.checkpoint.gguf_conversion import convert_gguf
from shard_server.engines.torch_engine.checkpoint.packed_files import find_packed, load_packed, multiplied_names
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.grouped_weight import GroupedWeight, joined_rows, quantised
from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from tests.fakes.tiny_llama import tiny_weights, write_tiny_gguf, write_tiny_llama

HALVES = {Type.Q6_K: [208], Type.Q4_0: [0], Type.Q5_0: [0], Type.Q8_0: [0]}
"""Where a block has float16; 0 and 2 otherwise"""
ROUNDED = (Type.Q4_K, Type.Q5_K, Type.Q6_K)
"""Their scales are products, which are rounded to float16."""
SIZES: dict[str, Any] = {
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
}
RUNNER: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16, "num_blocks": 8, "max_model_len": 64, "num_threads": 1}
TOKENS = list(range(3, 43))


def random_blocks(kind: Type, rows: int, columns: int) -> np.ndarray:
    """Any bits but those of float16, which are of the sizes that models have."""
    generator = np.random.default_rng(0)
    numbers, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (rows * columns // numbers, num_bytes), dtype=np.uint8)
    for at in HALVES.get(kind, [0, 2]):
        halves = generator.normal(0, 0.02, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0, *ROUNDED])
def test_every_kind_of_block_keeps_its_weights(kind: Type) -> None:
    """Whatever bits a file has, they mean what the gguf package says they mean; K-quants to 2**-11."""
    blocks = random_blocks(kind, 3, 512)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    weight = grouped_weight(blocks, kind)
    assert weight is not None
    for form in (weight, weight.general()):
        if kind in ROUNDED:
            tolerance = 2**-10 * expected.abs().unflatten(1, (-1, 256)).amax(2).repeat_interleave(256, 1)
            assert ((form.expanded() - expected).abs() <= tolerance).all()
        else:
            assert torch.equal(form.expanded(), expected)


def test_what_has_no_such_form_stays_bf16() -> None:
    """Blocks of other kinds, rows of no whole group, numbers beyond float16."""
    assert grouped_weight(random_blocks(Type.Q2_K, 2, 256), Type.Q2_K) is None
    assert grouped_weight(np.zeros((2, 64), np.float32), Type.F32) is None
    blocks = random_blocks(Type.Q4_0, 2, 64)
    blocks[0, :2] = np.array([60000], np.float16).view(np.uint8)
    assert grouped_weight(blocks, Type.Q4_0) is None


def test_rounding_to_groups_loses_half_a_step(tmp_path: Path) -> None:
    """int4 weights of safetensors files. A group of equal numbers has no steps."""
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    weight[2, 32:64] = 0.5
    for bits, steps in ((4, 15), (8, 254)):
        groups = weight.unflatten(1, (-1, 32))
        span = groups.amax(2) - groups.amin(2) if bits == 4 else 2 * groups.abs().amax(2)
        lost = (quantised(weight, bits).expanded() - weight).abs().unflatten(1, (-1, 32)).amax(2)
        assert (lost <= span / steps * 0.52 + 2**-10 * groups.abs().amax(2)).all()
    with pytest.raises(ValueError, match="not whole groups"):
        quantised(weight[:, :40], 4)


def test_rows_of_mixed_kinds_are_joined() -> None:
    """A file may have values in more bits than queries."""
    parts = [quantised(torch.randn(3, 64), bits) for bits in (4, 8)]
    joined = joined_rows(parts)
    assert isinstance(joined, GroupedWeight)
    assert torch.equal(joined.expanded(), torch.cat([part.expanded() for part in parts]))
    plain = torch.randn(2, 64).bfloat16()
    mixed = joined_rows([*parts, plain])
    assert isinstance(mixed, torch.Tensor)
    assert torch.equal(mixed[-2:], plain)


def converted(tmp_path: Path, kind: Type, **changes: object) -> Path:
    original = write_tiny_llama(tmp_path / "original", **SIZES, **changes)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tiny_weights(original), quantization=kind, **SIZES)
    convert_gguf(path, tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_converted_file_keeps_the_blocks_in_the_order_of_rows(tmp_path: Path, is_tied: bool) -> None:
    """Query rows are reordered: packed weights must be those of the bf16 ones beside them."""
    model_dir = converted(tmp_path, Type.Q4_1, tie_word_embeddings=is_tied)
    config = load_config(model_dir)
    weights = load_file(model_dir / "model.safetensors")
    packed = load_packed(model_dir, config)
    assert packed.keys() == set(multiplied_names(config))
    assert find_packed(model_dir, config).is_whole
    for name, weight in packed.items():
        assert torch.equal(weight.expanded().bfloat16(), weights[name]), name


def logits(model_dir: Path, **options: Any) -> torch.Tensor:
    """Of a prompt, and of tokens one by one after it"""
    runner = ModelRunner(model_dir, **RUNNER, **options)
    rows = [runner.run([ScheduledSequence(TOKENS[:30], 0, [0, 1, 2], True)])]
    rows += [
        runner.run([ScheduledSequence([token], place, [0, 1, 2], True)]) for place, token in enumerate(TOKENS[30:], 30)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0])
def test_a_model_computes_with_its_blocks(tmp_path: Path, kind: Type) -> None:
    """The same model as its expansion: no further from float32 than with bf16 weights, but for chance."""
    model_dir = converted(tmp_path, kind)
    packed, bf16 = logits(model_dir, weights="packed"), logits(model_dir, weights="dtype")
    exact = logits_in_float32(model_dir)
    assert torch.nn.functional.cosine_similarity(packed, bf16).min() > 0.999
    assert (packed - exact).norm() < 1.1 * (bf16 - exact).norm()


def logits_in_float32(model_dir: Path) -> torch.Tensor:
    """Of what the blocks stand for, by torch's operators"""
    config = load_config(model_dir)
    expanded = {name: weight.expanded() for name, weight in load_packed(model_dir, config).items()}
    whole = model_dir.parent / "float32"
    whole.mkdir()
    for file in model_dir.glob("*.json"):
        (whole / file.name).write_bytes(file.read_bytes())
    save_file(load_file(model_dir / "model.safetensors") | expanded, whole / "model.safetensors", {"format": "pt"})
    options: dict[str, Any] = {**RUNNER, "dtype": "float32"}
    runner = ModelRunner(whole, **options, kernels="torch")
    rows = [runner.run([ScheduledSequence(TOKENS[:30], 0, [0, 1, 2], True)])]
    rows += [
        runner.run([ScheduledSequence([token], place, [0, 1, 2], True)]) for place, token in enumerate(TOKENS[30:], 30)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("weights", ["packed", "int4"])
def test_all_families_without_tiles_compute_the_same_bits(tmp_path: Path, weights: str) -> None:
    """A whole forward pass: so shards on any CPU of that kind continue one another's answers."""
    families = pytest.importorskip("shard_server.engines.torch_engine.kernels.families")
    names = [family.name for family in families.runnable_families() if family.name != "amx"]
    model_dir = converted(tmp_path, Type.Q4_1)
    first, last = (logits(model_dir, weights=weights, kernels=name) for name in (names[0], names[-1]))
    assert torch.equal(first, last)
    variants = {
        ModelRunner(model_dir, **RUNNER, weights=weights, kernels=name).variant for name in (names[0], names[-1])
    }
    assert len(variants) == 1


def test_a_models_checksum_covers_what_it_computes_with(tmp_path: Path) -> None:
    """Receipts and `model.sha256` name the weights: a file that was exchanged must not pass."""
    model_dir = converted(tmp_path, Type.Q4_1)
    before = model_checksum(model_dir)
    path = model_dir / "packed.weights"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    assert model_checksum(model_dir) != before


def test_a_damaged_copy_is_damaged_in_every_form(tmp_path: Path) -> None:
    """Otherwise a shard would compute with the clean weights of the copy, and nothing could find the damage."""
    model_dir = converted(tmp_path, Type.Q4_1)
    assert damage(model_dir, tmp_path / "damaged", layer=1, noise=0.5) == 7
    for weights in ("dtype", "packed"):
        clean, damaged = (logits(folder, weights=weights) for folder in (model_dir, tmp_path / "damaged"))
        assert torch.nn.functional.cosine_similarity(clean, damaged).min() < 0.99
    variants = {ModelRunner(folder, **RUNNER, weights="packed").variant for folder in (model_dir, tmp_path / "damaged")}
    assert len(variants) == 1


def test_packed_weights_of_a_model_without_any_are_refused(tmp_path: Path) -> None:
    """Instead of computing with others than the operator asked for."""
    with pytest.raises(EngineError, match="packed weights are those of a GGUF file"):
        ModelRunner(write_tiny_llama(tmp_path, head_dim=64), **RUNNER, weights="packed")
    with pytest.raises(EngineError, match="packed weights need compiled kernels"):
        ModelRunner(converted(tmp_path, Type.Q4_1), **RUNNER, weights="packed", kernels="torch")


@pytest.mark.parametrize("damage", ["truncated", "of another model", "of another type"])
def test_damaged_packed_files_are_refused(tmp_path: Path, damage: str) -> None:
    """They come from anywhere, like all of a model."""
    model_dir = converted(tmp_path, Type.Q4_1)
    path = model_dir / "packed.weights"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-9])
    else:
        tensors = load_file(path)
        name = "model.layers.0.self_attn.q_proj.weight.words4"
        tensors[name] = tensors[name][:, :-1].contiguous() if damage == "of another model" else tensors[name].float()
        save_file(tensors, path)
    with pytest.raises(EngineError, match=r"packed\.weights"):
        ModelRunner(model_dir, **RUNNER, weights="packed")
