"""The compiler of guides for the tiny tokenizer's vocabulary, without a model."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from shard_server.engines.base import Guide
from shard_server.engines.torch_engine.sampling.guides import GuideState
from shard_server.engines.torch_engine.sampling.llguidance_guides import GuideCompiler
from tests.fakes.tiny_tokenizer import byte_level_tokenizer


def eos_token_id() -> int:
    return byte_level_tokenizer().token_to_id("<|im_end|>")


@functools.cache
def guide_compiler() -> GuideCompiler:
    tokenizer = byte_level_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(tokenizer.to_str())
        return GuideCompiler(path, tokenizer.get_vocab_size(), [eos_token_id()])


def started(guide: Guide) -> GuideState:
    """Raises GuideError."""
    return guide_compiler().start(guide, [eos_token_id()])


def accepts(guide: Guide, text: str) -> bool:
    """Whether a model that follows the guide can write exactly this text."""
    state = started(guide)
    for token_id in byte_level_tokenizer().encode(text).ids:
        if not _allows(state, token_id) or not state.take([token_id]):
            return False
    return _allows(state, eos_token_id())


def _allows(state: GuideState, token_id: int) -> bool:
    return bool(state.mask()[token_id >> 3] >> (token_id & 7) & 1)
