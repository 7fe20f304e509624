"""A model whose requests this process can take: it has the model's tokenizer, and no weights."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import xxhash

from kvloom.adapters import Adapter, full_name
from kvloom.v1.generation_pb2 import SamplingParams
from kvloom.v1.model_card_pb2 import ModelCard
from kvloom_common.config import ModelConfig
from kvloom_common.conversation.model_output import model_output
from kvloom_common.models.model_card import (
    PackedCard,
    config_of_card,
    make_card,
    tokenizer_checksum,
    unpack_card,
    unpacked_files,
)
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.text.tokenizer import ModelTokenizer

NO_DEFAULTS: Final = SamplingParams()


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that this process can tokenize for."""

    name: str
    tokenizer: ModelTokenizer
    created: int = 0
    """Unix time, for the OpenAI model object."""
    system_fingerprint: str = ""
    output: ParserSpec | None = None
    """How the model writes tool calls and reasoning; None: all that it writes is text."""
    version: str = ""
    aliases: Sequence[str] = ()
    succeeds: str = ""
    """The model that this one is to replace."""
    owned_by: str = "kvloom"
    default_sampling: SamplingParams | None = None
    """How tokens are sampled where a request does not say it; None: as everywhere."""
    default_max_tokens: int | None = None
    card: PackedCard | None = None
    """None: it cannot be given to other processes."""
    adapter: Adapter | None = None
    """Not None: this is the model with that adapter, and `name` is the full name of both."""
    base_name: str = ""
    """The name of the model without the adapter, if it has one."""

    def with_adapter(self, adapter: Adapter) -> ServedModel:
        """The model as requests for that adapter see it."""
        name = full_name(self.name, adapter.name)
        return dataclasses.replace(self, name=name, adapter=adapter, base_name=self.name, aliases=(), card=None)

    def has_tokens_of(self, other: ServedModel) -> bool:
        """True when the same ids are known to stand for the same tokens in both."""
        if self.tokenizer is other.tokenizer:
            return True
        if self.card is None or other.card is None:
            return False
        return self.card.tokenizer_checksum == other.card.tokenizer_checksum


def load_served_model(config: ModelConfig) -> ServedModel:
    """Read the model's files. Blocks. Raises OSError, ValueError, ConfigError."""
    card = make_card(config)
    return _served(config, Path(config.path), unpack_card(card.packed, card.checksum), card)


def served_model_of(packed: bytes, checksum: str) -> ServedModel:
    """The model of a card that another process has given. Blocks. Raises ModelCardError, OSError, ValueError,
    ConfigError."""
    card = unpack_card(packed, checksum)
    with unpacked_files(card) as folder:
        known = PackedCard(card.name, checksum, packed, tokenizer_checksum(card.files))
        return _served(config_of_card(card), folder, card, known)


def _served(config: ModelConfig, folder: Path, card: ModelCard, packed: PackedCard) -> ServedModel:
    tokenizer = ModelTokenizer.load(folder)
    fingerprint = xxhash.xxh3_64_hexdigest(f"{importlib.metadata.version('kvloom')}\0{packed.checksum}".encode())[:10]
    return ServedModel(
        name=config.name,
        tokenizer=tokenizer,
        created=int(time.time()),
        system_fingerprint=f"fp_{fingerprint}",
        output=model_output(config, folder, tokenizer),
        version=config.version,
        aliases=tuple(config.aliases),
        succeeds=config.succeeds,
        owned_by=config.owned_by,
        default_sampling=card.default_sampling if card.default_sampling != NO_DEFAULTS else None,
        default_max_tokens=card.default_max_tokens if card.HasField("default_max_tokens") else None,
        card=packed,
    )


def adapters_by_model(models: Iterable[ServedModel]) -> dict[str, set[str]]:
    """The names of the adapters of each model. `models` may contain each of both several times."""
    found: dict[str, set[str]] = {}
    for model in models:
        if model.adapter is None:
            found.setdefault(model.name, set())
        else:
            found.setdefault(model.base_name, set()).add(model.adapter.name)
    return found
