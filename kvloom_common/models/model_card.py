"""A model card is what a process must know of a model to take its requests, as one file that a shard gives to routers
and a router to edges. They need no other file of the model."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from google.protobuf.message import DecodeError

from kvloom.v1.generation_pb2 import SamplingParams
from kvloom.v1.model_card_pb2 import ModelCard, ModelFile
from kvloom_common.config import GenerationDefaults, ModelConfig
from kvloom_common.text.chat_template import read_json

TOKENIZER_FILE: Final = "tokenizer.json"
_FILES: Final = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    TOKENIZER_FILE,
    "tokenizer_config.json",
)
"""ModelTokenizer.load and model_output read these files; sorted."""
MAX_CARD_BYTES: Final = 256 * 2**20
MAX_PACKED_BYTES: Final = 128 * 2**20
_COMPRESSION_LEVEL: Final = 1
"""The fastest. Tokenizers become about a fifth of their size."""


class ModelCardError(Exception):
    """A card is damaged, or not the one that was asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedCard:
    """A card as it is transferred and kept in memory."""

    model: str
    checksum: str
    """The SHA-256 of the card before compression, in hex."""
    packed: bytes
    tokenizer_checksum: str = ""
    """The SHA-256 of tokenizer.json, in hex."""


def make_card(config: ModelConfig) -> PackedCard:
    """Read the model's files. Blocks. Raises OSError and ValueError."""
    folder = Path(config.path)
    defaults = with_generation_config(config, folder)
    files = [ModelFile(name=name, content=(folder / name).read_bytes()) for name in _FILES if _has(folder, name)]
    card = ModelCard(
        name=config.name,
        version=config.version,
        aliases=config.aliases,
        owned_by=config.owned_by,
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        default_sampling=_sampling_of(defaults),
        default_max_tokens=defaults.max_tokens,
        files=files,
        succeeds=config.succeeds,
    )
    raw = card.SerializeToString(deterministic=True)
    if len(raw) > MAX_CARD_BYTES:
        raise ValueError(f"{folder}: tokenizer and chat template have more than {MAX_CARD_BYTES} bytes")
    checksum = hashlib.sha256(raw).hexdigest()
    return PackedCard(config.name, checksum, zlib.compress(raw, _COMPRESSION_LEVEL), tokenizer_checksum(files))


def tokenizer_checksum(files: Iterable[ModelFile]) -> str:
    """The SHA-256 of a card's tokenizer.json, in hex."""
    tokenizer = next((file.content for file in files if file.name == TOKENIZER_FILE), b"")
    return hashlib.sha256(tokenizer).hexdigest()


def _has(folder: Path, name: str) -> bool:
    """A tokenizer that is missing is an error that names it."""
    return name == TOKENIZER_FILE or (folder / name).is_file()


def _sampling_of(defaults: GenerationDefaults) -> SamplingParams:
    return SamplingParams(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
        seed=defaults.seed,
    )


def unpack_card(packed: bytes, checksum: str, max_bytes: int = MAX_CARD_BYTES) -> ModelCard:
    """The card with this checksum. Raises ModelCardError."""
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(packed, max_bytes)
    except zlib.error as error:
        raise ModelCardError(f"the model card is damaged: {error}") from error
    if not unpacker.eof:
        raise ModelCardError(f"the model card is cut off, or has more than {max_bytes} bytes")
    if hashlib.sha256(raw).hexdigest() != checksum:
        raise ModelCardError("the model card is damaged: it has another checksum")
    try:
        return ModelCard.FromString(raw)
    except DecodeError as error:
        raise ModelCardError("the model card is damaged: it is none") from error


def config_of_card(card: ModelCard) -> ModelConfig:
    """Returns what the configuration of the card's maker says of the model."""
    return ModelConfig(
        name=card.name,
        version=card.version,
        aliases=list(card.aliases),
        owned_by=card.owned_by,
        tool_parser=card.tool_parser,
        reasoning_parser=card.reasoning_parser,
        succeeds=card.succeeds,
    )


@contextlib.contextmanager
def unpacked_files(card: ModelCard) -> Iterator[Path]:
    """A folder with the card's files, for code that reads a model's directory. Blocks. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="kvloom-card-") as folder:
        for file in card.files:
            if file.name in _FILES:  # the names come from another process
                (Path(folder) / file.name).write_bytes(file.content)
        yield Path(folder)


_NAMES: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Maps its names to those of [model.defaults]; all other entries are not about sampling, or concern searches that no
engine here does."""


def with_generation_config(config: ModelConfig, folder: Path) -> GenerationDefaults:
    """The defaults of a model: those of its configuration, and for what it does not say those of
    generation_config.json, unless the configuration says to leave it. Values that no request may have count as absent.
    Raises ValueError for a file that cannot be read."""
    if not config.reads_generation_config:
        return config.defaults
    given = read_json(folder / "generation_config.json")
    changes = {
        ours: given[theirs]
        for theirs, ours in _NAMES.items()
        if getattr(config.defaults, ours) is None and theirs in given
    }
    return msgspec.structs.replace(
        config.defaults, **{name: value for name, value in changes.items() if _fits(name, value)}
    )


def _fits(name: str, value: Any) -> bool:
    try:
        msgspec.convert({name: value}, GenerationDefaults)
    except msgspec.ValidationError:
        return False
    return value is not None
