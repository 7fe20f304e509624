"""Model directories that cannot be used are refused with the file and the fault named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine import memory, model_runner
from shard_server.engines.torch_engine.config import load_config
from shard_server.engines.torch_engine.model_runner import ModelRunner
from tests.fakes.tiny_llama import TINY_CONFIG, tiny_weights, write_tiny_llama


def load(model_dir: Path, **changes: Any) -> ModelRunner:
    arguments = {"dtype": "bfloat16", "block_size": 16, "num_blocks": 8, "max_model_len": 0, "num_threads": 1}
    return ModelRunner(model_dir, **(arguments | changes))


def test_a_good_directory_loads(tmp_path: Path):
    """The others below fail because of their fault, not because of the fixture."""
    runner = load(write_tiny_llama(tmp_path))
    assert (runner.vocab_size, runner.max_model_len, runner.num_blocks) == (320, 2048, 8)
    assert runner.eos_token_ids == {2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_neox"}, "'gpt_neox' is not supported"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "'low_freq_factor' is missing"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"partial_rotary_factor": 0.5}, "part of the head"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be a positive integer"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2, "sliding_window": 8}, "layer_types"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "layer_types": ["x"]}, "layer_types"),
    ],
)
def test_an_unusable_config_is_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    """Ignoring a setting would compute another model than the one asked for."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG | changes))
    with pytest.raises(EngineError, match=message):
        load_config(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, content: bytes):
    """A stack trace would not name the file."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(EngineError, match=r"config\.json"):
        load_config(tmp_path)


def test_missing_files_are_refused(tmp_path: Path):
    """A directory that is no model at all."""
    with pytest.raises(EngineError, match=r"config\.json"):
        load(tmp_path)
    (write_tiny_llama(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"no \.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights_are_refused(tmp_path: Path, share: float):
    """Reading behind the end of a mapped file would kill the process."""
    path = write_tiny_llama(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(EngineError, match="truncated"):
        load(tmp_path)


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path):
    """config.json and weights of two models in one directory."""
    write_tiny_llama(tmp_path)
    weights = tiny_weights(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    for broken, message in (
        ({key: weight for key, weight in weights.items() if key != name}, f"{name}' missing"),
        (weights | {name: weights[name][:-1].contiguous()}, "config.json implies"),
        (weights | {name: torch.zeros(128, 64, dtype=torch.int8)}, "type I8, which is not supported"),
        (weights | {name: torch.zeros(128, 64, dtype=torch.float8_e4m3fn)}, "type F8_E4M3, which is not supported"),
        (weights | {"model.layers.0.self_attn.q_norm.weight": torch.ones(32)}, "unexpected tensor .*q_norm"),
        (weights | {"model.layers.2.mlp.up_proj.weight": torch.ones(1)}, "unexpected tensor .*layers.2"),
    ):
        save_file(broken, tmp_path / "model.safetensors")
        with pytest.raises(EngineError, match=message):
            load(tmp_path)


def test_tensors_that_follow_from_the_config_may_lie_beside_the_weights(tmp_path: Path):
    """Old files hold rotary tables, and some models with a tied head hold it twice."""
    write_tiny_llama(tmp_path)
    weights = tiny_weights(tmp_path)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
        "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
    }
    save_file(weights | extra, tmp_path / "model.safetensors")
    load(tmp_path)


def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path):
    """A downloaded model must not make the engine open any other file of the machine."""
    write_tiny_llama(tmp_path)
    for places in ({"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {}, {"a": 3}):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        with pytest.raises(EngineError, match=r"index\.json: damaged"):
            load(tmp_path)


def test_a_sliding_window_does_not_bound_the_length_of_sequences(tmp_path: Path):
    """It bounds what a token sees, not what is served."""
    model_dir = write_tiny_llama(tmp_path, model_type="mistral", sliding_window=64)
    assert load(model_dir).max_model_len == 2048
    with pytest.raises(EngineError, match="more than the 2048"):
        load(model_dir, max_model_len=2049)


def test_too_little_memory_is_told_before_anything_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else the kernel kills the process in the middle of loading, without an explanation."""
    model_dir = write_tiny_llama(tmp_path)
    touched: list[Path] = []
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 64 * 2**20)
    monkeypatch.setattr(model_runner, "load_weights", lambda model_dir, *_: touched.append(model_dir))
    with pytest.raises(EngineError, match=r"too little memory: the weights need .* GiB are available"):
        load(model_dir)
    assert not touched


def test_loading_tells_how_far_it_is(tmp_path: Path):
    """A large model takes minutes; silence looks like a hang."""
    messages: list[str] = []
    load(write_tiny_llama(tmp_path), on_progress=messages.append)
    assert "weights: file 1 of 1, model.safetensors" in messages
    assert "weights: layer 2 of 2" in messages
    assert any(message.startswith("KV cache: 8 blocks") for message in messages)


def test_sharded_weights_load_and_a_missing_shard_is_refused(tmp_path: Path):
    """Models of some size come in several files."""
    write_tiny_llama(tmp_path)
    weights = tiny_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(weights)
    places = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file_name in set(places.values()):
        save_file({name: weights[name] for name in names if places[name] == file_name}, tmp_path / file_name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    load(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(EngineError, match=r"model-1\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"), [({"max_model_len": 4096}, "more than the 2048"), ({"num_blocks": 10**9}, "GiB of memory")]
)
def test_settings_beyond_the_model_or_the_machine_are_refused(tmp_path: Path, changes: dict[str, int], message: str):
    """Better at the start than in the middle of an answer."""
    with pytest.raises(EngineError, match=message):
        load(write_tiny_llama(tmp_path), **changes)
