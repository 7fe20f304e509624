"""GGUF files become directories that hold exactly the same model, once, whichever process asks and whatever was there
before."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.converted_model import (
    ensure_builtin_model,
    ensure_converted_model,
    find_builtin_gguf,
)
from shard_server.engines.torch_engine.checkpoint.gguf_conversion import convert_gguf
from shard_server.engines.torch_engine.config import load_config
from tests.fakes.tiny_llama import TINY_CONFIG, tiny_weights, write_tiny_gguf, write_tiny_llama


@pytest.fixture
def original(tmp_path: Path) -> dict[str, torch.Tensor]:
    return tiny_weights(write_tiny_llama(tmp_path / "original"))


@pytest.fixture
def gguf_path(tmp_path: Path, original: dict[str, torch.Tensor]) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf", original)


def test_every_tensor_comes_back_bit_for_bit(gguf_path: Path, original: dict[str, torch.Tensor], tmp_path: Path):
    """A query row in the wrong place gives fluent nonsense, which no error would tell."""
    convert_gguf(gguf_path, tmp_path / "out")
    converted = load_file(tmp_path / "out" / "model.safetensors")
    assert converted.keys() == original.keys()
    for name, weight in original.items():
        assert torch.equal(converted[name], weight), name


def test_config_and_tokenizer_are_those_of_the_file(gguf_path: Path, tmp_path: Path):
    """What the engine computes and how text is cut come from metadata, not from the tensors."""
    convert_gguf(gguf_path, tmp_path / "out")
    expected = load_config(write_tiny_llama(tmp_path / "expected"))
    assert load_config(tmp_path / "out") == expected
    assert expected.rms_norm_eps == TINY_CONFIG["rms_norm_eps"]
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    text = "hello 42\n<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert [tokenizer.id_to_token(token_id) for token_id in ids] == ["hello", "Ġ", "4", "2", "Ċ", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello 42\n"


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_an_engine_error(gguf_path: Path, tmp_path: Path, share: float):
    """Downloads break off; the operator must read which file is broken, not a stack trace."""
    content = gguf_path.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(EngineError, match=r"broken\.gguf"):
        ensure_converted_model(broken, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("broken*")), "no half of a model is left to be taken for one"


@pytest.mark.parametrize("content", [b"GGUF" + bytes(64), b"GGUF\x03\0\0\0" + b"\xff" * 64, b"PK\x03\x04 a zip file"])
def test_garbage_is_an_engine_error(tmp_path: Path, content: bytes):
    """Counts and lengths in the header are the file's word, and may be anything."""
    (tmp_path / "broken.gguf").write_bytes(content)
    with pytest.raises(EngineError, match=r"broken\.gguf"):
        convert_gguf(tmp_path / "broken.gguf", tmp_path / "out")


def test_other_architectures_are_refused_by_name(tmp_path: Path, original: dict[str, torch.Tensor]):
    """Computing another architecture as Llama would answer nonsense."""
    path = write_tiny_gguf(tmp_path / "falcon.gguf", original, architecture="falcon")
    with pytest.raises(EngineError, match="'falcon' is not supported"):
        convert_gguf(path, tmp_path / "out")


def test_a_missing_file_is_an_engine_error(tmp_path: Path):
    """A mistyped --model is the commonest fault."""
    with pytest.raises(EngineError, match=r"absent\.gguf"):
        ensure_converted_model(tmp_path / "absent.gguf", tmp_path / "cache")


def test_a_complete_directory_is_used_again_and_a_damaged_one_is_made_anew(gguf_path: Path, tmp_path: Path):
    """Conversion takes seconds at every start otherwise; and a cache must not serve what a full disk cut short."""
    messages: list[str] = []
    model_dir = ensure_converted_model(gguf_path, tmp_path / "cache", on_progress=messages.append)
    assert messages
    messages.clear()
    assert ensure_converted_model(gguf_path, tmp_path / "cache", on_progress=messages.append) == model_dir
    assert not messages
    weights = model_dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert ensure_converted_model(gguf_path, tmp_path / "cache", on_progress=messages.append) == model_dir
    assert messages
    assert load_file(weights)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [model_dir.name]


def test_a_conversion_without_weights_has_all_else(gguf_path: Path, tmp_path: Path):
    """The sim engine reads no weights: for it, a minute and 261 MB of conversion are for nothing."""
    whole = ensure_converted_model(gguf_path, tmp_path / "whole")
    light = ensure_converted_model(gguf_path, tmp_path / "light", with_weights=False)
    files = {path.name for path in whole.iterdir()}
    assert {path.name for path in light.iterdir()} == files - {"model.safetensors"}
    for name in files - {"model.safetensors", "conversion.json"}:
        assert (light / name).read_bytes() == (whole / name).read_bytes()
    assert ensure_converted_model(gguf_path, tmp_path / "whole", with_weights=False) == whole
    assert ensure_converted_model(gguf_path, tmp_path / "light") != light, "an engine with weights needs them"


def _convert_in_process(arguments: tuple[Path, Path]) -> int:
    """The number of conversions that this process made."""
    messages: list[str] = []
    ensure_converted_model(*arguments, on_progress=messages.append)
    return sum("converting" in message for message in messages)


def test_two_processes_at_once_convert_once(gguf_path: Path, tmp_path: Path):
    """`kvloom up` starts shards side by side on a cold cache."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        conversions = pool.map_async(_convert_in_process, [(gguf_path, tmp_path / "cache")] * 2, chunksize=1).get(60)
    assert sum(conversions) == 1


def test_the_built_in_model_is_the_one_in_the_wheel(model_dir: Path):
    """The first thing a new user runs."""
    config = load_config(model_dir)
    assert (config.vocab_size, config.num_layers, config.num_heads, config.num_kv_heads) == (49152, 30, 9, 3)
    assert (config.rope_theta, config.max_position_embeddings) == (100_000.0, 8192)
    assert config.eos_token_ids == {0, 2}
    assert find_builtin_gguf().is_file()
    assert ensure_builtin_model(model_dir.parent) == model_dir
