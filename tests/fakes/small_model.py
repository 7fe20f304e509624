"""A model's directory for the sim engine: services read it in milliseconds, and the built-in model's takes half a
second, most of it for its 49,152 tokens."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from shard_server.engines.sim_tokens import WORD_TOKEN_IDS
from tests.fakes.tiny_tokenizer import CHATML, SPECIAL, byte_level_tokenizer

END = "<|im_end|>"


@functools.cache
def small_tokenizer() -> Tokenizer:
    """Byte-level, with a word for each token of the sim engine."""
    tokenizer = json.loads(byte_level_tokenizer().to_str())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["added_tokens"] = []
    vocabulary |= {f"Ġword{number}": number for number in range(len(vocabulary), max(WORD_TOKEN_IDS) + 1)}
    whole = Tokenizer.from_str(json.dumps(tokenizer))
    whole.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return whole


def write_small_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    small_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 8192}')
    return folder
