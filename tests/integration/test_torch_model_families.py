"""Every model family, from safetensors and from GGUF, computes what transformers computes: random shapes, float32."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint import gguf_weights
from shard_server.engines.torch_engine.checkpoint.converted_model import ensure_converted_model
from shard_server.engines.torch_engine.checkpoint.gguf_conversion import convert_gguf
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence
from shard_server.engines.torch_engine.rope import RopeScaling, llama3_factors
from tests.fakes.tiny_llama import tiny_weights, write_tiny_gguf, write_tiny_llama
from tests.lazy_imports import imported_when_used

pytestmark = pytest.mark.xdist_group("transformers")  # which takes seconds to import
transformers = imported_when_used("transformers")

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama3": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3_SCALING},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 96},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}
NUM_TOKENS = 90
MAX_ERROR = 1e-4
"""The largest difference of a logit. Logits here are about 1 to 5, and float32 sums are taken in another order."""


def random_shape(family: str, seed: int) -> dict[str, Any]:
    """Returns random head counts, sizes and bases, which a loader might read from the wrong place. Qwen2 has no
    head_dim."""
    rng = random.Random(f"{family}{seed}")
    num_kv_heads = rng.choice([1, 2, 3])
    num_heads = num_kv_heads * rng.choice([1, 2, 4])
    head_dim = rng.choice([16, 32])
    hidden_size = num_heads * (head_dim if family == "qwen2" else rng.choice([8, 24]))
    return FAMILIES[family] | {
        "num_key_value_heads": num_kv_heads,
        "num_attention_heads": num_heads,
        "head_dim": head_dim,
        "hidden_size": hidden_size,
        "intermediate_size": rng.choice([64, 160]),
        "num_hidden_layers": rng.choice([1, 3]),
        "rope_theta": rng.choice([10_000.0, 1_000_000.0]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "tie_word_embeddings": bool(seed % 2),
    }


def our_logits(model_dir: Path, token_ids: list[int]) -> torch.Tensor:
    """Returns the logits of the last half of the positions: a prefill in two chunks, then decoding one by one."""
    runner = ModelRunner(model_dir, dtype="float32", block_size=16, num_blocks=16, max_model_len=96, num_threads=1)
    half = len(token_ids) // 2
    table = list(range(15, 0, -1))
    runner.run([ScheduledSequence(token_ids[: half - 9], 0, table, False)])
    rows = [runner.run([ScheduledSequence(token_ids[half - 9 : half], half - 9, table, True)])]
    rows += [
        runner.run([ScheduledSequence([token_ids[position]], position, table, True)])
        for position in range(half, len(token_ids))
    ]
    return torch.cat(rows)


def parity_error(model_dir: Path) -> float:
    """Returns the largest difference of a logit from transformers', both in float32."""
    token_ids = torch.randint(0, 320, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        reference = model(torch.tensor([token_ids])).logits[0, NUM_TOKENS // 2 - 1 :]
    return float((our_logits(model_dir, token_ids) - reference).abs().max())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_safetensors_of_every_family_compute_what_transformers_computes(tmp_path: Path, family: str, seed: int):
    """In float32 a wrong rotation, a missing bias or norm, or an extra head exceeds any rounding error."""
    assert parity_error(write_tiny_llama(tmp_path, **random_shape(family, seed))) < MAX_ERROR


def gguf_of(tmp_path: Path, family: str, seed: int, **options: Any) -> tuple[Path, Path]:
    """Returns a random model's directory, and the same model as a GGUF file."""
    shape = random_shape(family, seed) | {key: options[key] for key in options.keys() & {"hidden_size"}}
    original = write_tiny_llama(tmp_path / "original", **shape)
    changes = {key: value for key, value in shape.items() if key not in ("model_type", "architectures", "rope_scaling")}
    if family == "llama3":
        scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
        changes["rope_factors"] = llama3_factors(shape["head_dim"], shape["rope_theta"], scaling).tolist()
    architecture = family if family.startswith("qwen") else "llama"
    path = write_tiny_gguf(
        tmp_path / "tiny.gguf", tiny_weights(original), architecture=architecture, **(changes | options)
    )
    return original, path


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_of_every_family_is_the_same_model(tmp_path: Path, family: str, seed: int):
    """Metadata names, tensor names and row order differ by architecture, and mixing them up yields nonsense."""
    original, path = gguf_of(tmp_path, family, seed)
    converted = ensure_converted_model(path, tmp_path / "cache")
    expected, actual = load_file(original / "model.safetensors"), load_file(converted / "model.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], weight) for name, weight in expected.items())
    assert load_config(converted) == load_config(original)
    assert parity_error(converted) < MAX_ERROR


QUANTIZED = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantised_gguf_comes_back_as_its_blocks_say(tmp_path: Path, kind: str):
    """The K-quants, which the gguf package reads but does not write, are covered by the built-in model."""
    quantization = gguf.GGMLQuantizationType[kind]
    original, path = gguf_of(tmp_path, "qwen3", 1, quantization=quantization, hidden_size=192)  # blocks of 32
    convert_gguf(path, tmp_path / "out")
    converted = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weight = load_file(original / "model.safetensors")[name].float().numpy()
    blocks = gguf.quants.quantize(weight, quantization)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, quantization)).to(torch.bfloat16)
    assert torch.equal(converted[name], expected)
    assert parity_error(tmp_path / "out") < MAX_ERROR


def test_large_models_are_converted_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Conversion must not need the whole model in memory."""
    original, path = gguf_of(tmp_path, "llama", 0)
    monkeypatch.setattr(gguf_weights, "_MAX_FILE_BYTES", 20_000)
    convert_gguf(path, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["weight_map"].keys() == load_file(original / "model.safetensors").keys()
    assert parity_error(tmp_path / "out") < MAX_ERROR


def test_a_sharded_directory_computes_the_same(tmp_path: Path):
    """Only the index decides which file has a tensor."""
    model_dir = write_tiny_llama(tmp_path, **random_shape("qwen3", 0))
    weights = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    places = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(sorted(weights))}
    for file_name in set(places.values()):
        part = {name: weight for name, weight in weights.items() if places[name] == file_name}
        save_file(part, model_dir / file_name, metadata={"format": "pt"})
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert parity_error(model_dir) < MAX_ERROR


def test_rope_factors_of_an_unknown_kind_are_refused(tmp_path: Path):
    """Failing is better than loading another model."""
    _, path = gguf_of(tmp_path, "llama", 0, rope_factors=[1.0, 3.0])
    with pytest.raises(EngineError, match="factors of an unknown kind"):
        convert_gguf(path, tmp_path / "out")
