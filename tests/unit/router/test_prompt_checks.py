"""Checks of the tokens of prompts."""

from __future__ import annotations

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.generation_pb2 import PromptImage
from kvloom_common.limits.memory_watch import LARGE_BYTES, MemoryLevel
from kvloom_common.models.served_model import ServedModel
from kvloom_common.text.prompt_images import image_token_ids, words_of
from router.prompt_checks import PromptChecks
from tests.fakes.tiny_tokenizer import model_tokenizer


def test_a_prompt_may_be_an_image_and_nothing_else() -> None:
    """Its tokens are of no vocabulary, and are no wrong words because there are no right ones."""
    checks, model = PromptChecks({}, 100, lambda: False), ServedModel("m", model_tokenizer())
    token_ids = image_token_ids(b"a", 3)
    words = words_of(token_ids, [PromptImage(num_tokens=3, data=b"a")], is_trusted=False)
    checks.check_tokens(token_ids, model, "token_ids.ids", words)
    with pytest.raises(KvloomError, match="ids of this model are below"):
        checks.check_tokens(token_ids, model, "token_ids.ids")


def test_large_images_have_no_room_while_memory_is_short() -> None:
    """They are what is large of a prompt with few words, and would be taken in without end."""
    checks = PromptChecks({}, 100, lambda: False)
    small, large = PromptImage(data=bytes(1000)), PromptImage(data=bytes(LARGE_BYTES))
    checks.check_images([small, large])
    checks.on_memory_level(MemoryLevel.HIGH)
    checks.check_images([small])
    with pytest.raises(KvloomError) as caught:
        checks.check_images([small, large])
    assert caught.value.reason_name == "OVERLOADED"
    checks.on_memory_level(MemoryLevel.NORMAL)
    checks.check_images([small, large])
