"""Model cards: what edges and routers get instead of the model's files."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

import pytest

from kvloom.v1.model_card_pb2 import ModelCard
from kvloom_common.config import GenerationDefaults, ModelConfig
from kvloom_common.models import model_card
from kvloom_common.models.model_card import MAX_CARD_BYTES, ModelCardError, make_card, unpack_card
from kvloom_common.models.served_model import load_served_model, served_model_of
from kvloom_common.text.chat_template import ChatMessage
from tests.fakes.tiny_tokenizer import CHATML, byte_level_tokenizer


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    defaults = GenerationDefaults(temperature=0.25, max_tokens=77, seed=2**63 - 1)
    return ModelConfig(name="tiny", version="3", path=str(tmp_path), aliases=["t"], defaults=defaults, owned_by="us")


def test_a_card_serves_like_the_files(config: ModelConfig) -> None:
    """An edge on another machine must render, tokenize and end prompts exactly as one that has the model's files."""
    own = load_served_model(config)
    card = make_card(config)
    other = served_model_of(card.packed, card.checksum)
    messages = [ChatMessage("user", "the quick brown fox, 日本")]
    assert other.tokenizer.render_chat(messages) == own.tokenizer.render_chat(messages)
    text = "the lazy dog <|im_end|> é"
    assert other.tokenizer.encode_now(text) == own.tokenizer.encode_now(text)
    assert other.tokenizer.eos_token_ids == own.tokenizer.eos_token_ids
    assert (other.name, other.version, other.aliases, other.owned_by) == ("tiny", "3", ("t",), "us")
    assert (other.default_sampling, other.default_max_tokens) == (own.default_sampling, 77)
    assert other.default_sampling is not None
    assert (other.default_sampling.temperature, other.default_sampling.seed) == (0.25, 2**63 - 1)
    assert (other.output, other.system_fingerprint) == (own.output, own.system_fingerprint)
    assert other.card is not None
    assert other.card.checksum == card.checksum
    assert b"weights" not in zlib.decompress(card.packed)


def test_without_defaults_nothing_is_merged_into_requests(config: ModelConfig) -> None:
    """What is not configured costs nothing."""
    config.defaults = GenerationDefaults()
    assert load_served_model(config).default_sampling is None
    assert load_served_model(config).default_max_tokens is None


def test_the_checksum_changes_with_each_file_and_setting(config: ModelConfig) -> None:
    """Processes compare checksums to find out whether they tokenize alike."""
    checksums = [make_card(config).checksum, make_card(config).checksum]
    assert len(set(checksums)) == 1
    for name in ("tokenizer_config.json", "chat_template.jinja", "config.json"):
        path = Path(config.path) / name
        path.write_text(path.read_text() + "\n")
        checksums.append(make_card(config).checksum)
    config.tool_parser = "hermes"
    checksums.append(make_card(config).checksum)
    assert len(set(checksums)) == 5


@pytest.mark.parametrize("kind", ["other checksum", "cut off", "no zlib", "no card", "too large"])
def test_a_damaged_card_is_one_clear_error(config: ModelConfig, kind: str) -> None:
    """It comes from another process, which may be broken or of another version; memory must not grow with it."""
    card = make_card(config)
    packed, checksum, max_bytes = card.packed, card.checksum, MAX_CARD_BYTES
    match kind:
        case "other checksum":
            checksum = "0" * 64
        case "cut off":
            packed = packed[:-10]
        case "no zlib":
            packed = b"\x00" * 100
        case "no card":
            packed, checksum = zlib.compress(b"\xff\xff"), hashlib.sha256(b"\xff\xff").hexdigest()
        case _:
            max_bytes = 1000
    with pytest.raises(ModelCardError, match="model card"):
        unpack_card(packed, checksum, max_bytes)


def test_names_of_files_do_not_lead_out_of_the_folder(config: ModelConfig, tmp_path: Path) -> None:
    """A card must not write where it likes."""
    card = make_card(config)
    content = ModelCard.FromString(zlib.decompress(card.packed))
    content.files.add(name="../evil.json", content=b"{}")
    raw = content.SerializeToString()
    served_model_of(zlib.compress(raw), hashlib.sha256(raw).hexdigest())
    with model_card.unpacked_files(content) as folder:
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            path.name for path in tmp_path.iterdir() if path.suffix != ".safetensors"
        )
        assert not (folder.parent / "evil.json").exists()


def test_a_missing_tokenizer_is_named(config: ModelConfig) -> None:
    """The most common mistake is a path to the wrong folder."""
    (Path(config.path) / "tokenizer.json").unlink()
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        make_card(config)
