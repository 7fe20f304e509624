"""Models that a process under test serves, without their files."""

from __future__ import annotations

from kvloom_common.config import KvloomConfig
from kvloom_common.conversation.model_output import model_output
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.served_model import ServedModel
from kvloom_common.text.tokenizer import ModelTokenizer
from tests.fakes.tiny_tokenizer import model_tokenizer


def tiny_model(name: str = "tiny", tokenizer: ModelTokenizer | None = None) -> ServedModel:
    return ServedModel(name, tokenizer or model_tokenizer(), 1_700_000_000, "fp_test")


def tiny_models(name: str = "tiny", tokenizer: ModelTokenizer | None = None) -> dict[str, ServedModel]:
    return {name: tiny_model(name, tokenizer)}


def catalogue_of(config: KvloomConfig, tokenizer: ModelTokenizer | None = None) -> Catalogue:
    """The configured model with another tokenizer."""
    tokenizer = tokenizer or model_tokenizer()
    output = model_output(config.model, None, tokenizer)
    return Catalogue([ServedModel(config.model.name, tokenizer, 1_700_000_000, "fp_test", output)])
