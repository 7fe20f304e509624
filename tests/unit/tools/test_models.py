"""Models have names, versions and checksums: what is served is what was registered."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvloom_common.config import KvloomConfig
from kvloom_common.process.service import StartError
from kvloom_common.text.model_checksum import ChecksumError, check_model, model_checksum
from shard_server.__main__ import _load
from tools.cli.commands import main
from tools.failures import CommandError
from tools.models.registry import ModelRegistry
from tools.models.resolve import resolve_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "README.md"):
        (path / name).write_text(name)
    return path


def test_the_checksum_is_what_sha256sum_gives(model: Path):
    """A publisher must be able to compute the checksum of a model without kvloom."""
    listing = subprocess.run(
        "sha256sum config.json model.safetensors tokenizer.json | sha256sum",
        shell=True,
        cwd=model,
        capture_output=True,
        text=True,
        check=True,
    )
    assert model_checksum(model) == listing.stdout.split()[0]
    assert model_checksum(model / "config.json") == hashlib.sha256(b"config.json").hexdigest()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_any_change_of_a_file_that_matters_is_noticed(model: Path, name: str):
    """With a flipped bit in the weights all answers would be slightly wrong."""
    sha256 = model_checksum(model)
    (model / "README.md").write_text("other words")
    check_model(model, sha256)
    check_model(model, "")
    (model / name).write_text("changed")
    with pytest.raises(ChecksumError, match=rf"have changed or are damaged: .*{sha256}"):
        check_model(model, sha256)


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    """The operator must read which path is wrong."""
    with pytest.raises(ChecksumError, match="absent"):
        model_checksum(tmp_path / "absent")
    with pytest.raises(ChecksumError, match="no model files"):
        model_checksum(tmp_path)


def test_a_shard_rejects_files_other_than_the_registered_ones(model: Path):
    """It must not join the fleet and answer with another model."""
    config = KvloomConfig()
    config.model.path, config.model.sha256 = str(model), "0" * 64
    with pytest.raises(StartError, match="have changed or are damaged"):
        _load(config)


def test_a_name_resolves_to_the_latest_version_or_the_one_that_is_named(model: Path, tmp_path: Path):
    """Users type both `llama` and `llama@1`."""
    registry = ModelRegistry(tmp_path / "models.json")
    other = tmp_path / "other"
    model.rename(other)
    first = registry.add("llama", other, "1")
    second = registry.add("llama", other, "2")
    assert registry.models() == [first, second]
    assert registry.find("llama") == second
    assert registry.find("llama@1") == first
    assert resolve_model("llama", tmp_path / "cache", lambda _: None, registry) == ("llama", other, second.sha256, "2")
    with pytest.raises(CommandError, match="registered already"):
        registry.add("llama", other, "1")
    registry.remove("llama@2")
    assert registry.find("llama") == first
    with pytest.raises(CommandError, match="no such model: qwen"):
        resolve_model("qwen", tmp_path / "cache", lambda _: None, registry)


def test_a_gguf_file_is_checked_before_it_is_converted(tmp_path: Path):
    """The shards see only the converted model."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    registry = ModelRegistry(tmp_path / "models.json")
    registry.add("tiny", path)
    path.write_bytes(b"GGUX")
    with pytest.raises(CommandError, match="have changed or are damaged"):
        resolve_model("tiny", tmp_path / "cache", lambda _: None, registry)


@pytest.mark.parametrize("content", [b"{", b'[{"name": "x"}]', b'[{"name": "x", "path": "y", "sha256": 3}]'])
def test_a_damaged_registry_is_named(tmp_path: Path, content: bytes):
    """Users may edit the file."""
    (tmp_path / "models.json").write_bytes(content)
    with pytest.raises(CommandError, match=r"models\.json"):
        ModelRegistry(tmp_path / "models.json").models()


def test_the_command_adds_lists_verifies_and_removes(model: Path, tmp_path: Path):
    """All steps that a user takes with a model."""

    def kvloom(*args: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["models", *args, "--data-dir", str(tmp_path / "data")])
        return result.exit_code, result.output

    assert kvloom("add", "weights", str(model), "--version", "1.0")[0] == 0
    assert kvloom("verify") == (0, "weights@1.0: as registered\n")
    (model / "model.safetensors").write_text("changed")
    status, output = kvloom("verify", "weights")
    assert (status, "have changed" in output) == (1, True)
    listed = json.loads(kvloom("list", "--json")[1])
    assert [entry["name"] for entry in listed] == ["weights"]
    assert "weights@1.0" in kvloom("list")[1]
    assert kvloom("remove", "weights@1.0") == (0, "removed weights@1.0\n")
    assert kvloom("remove", "weights")[0] == 1
    for bad in ("../x", "a b", ""):
        assert kvloom("add", bad, str(model))[0] == 1
    assert kvloom("add", "empty", str(tmp_path))[0] == 1
