"""The prompts of bodies, with a tokenizer and without."""

from __future__ import annotations

import json

import pytest

from tests.fakes.tiny_tokenizer import model_tokenizer
from tools.gateway.kv_events import prefix_salt
from tools.gateway.prompts import CHAT_PATH, COMPLETION_PATH, NO_PROMPT, PromptReader

TURNS = [{"role": "user", "content": "hello, " * 20}, {"role": "assistant", "content": "good day"}]


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


async def test_without_a_tokenizer_equal_beginnings_are_equal_pieces() -> None:
    """The next turn of a conversation repeats all earlier ones."""
    reader = PromptReader()
    for path, field in ((CHAT_PATH, "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")):
        first = await reader.read(path, body(**{field: TURNS[:1]}))
        second = await reader.read(path, body(**{field: TURNS}))
        num_shared = len(first.token_ids) - 1  # the last one has the end of the list
        assert num_shared > 30
        assert list(first.token_ids[:num_shared]) == list(second.token_ids[:num_shared])
        other = await reader.read(path, body(**{field: TURNS[:1], "tools": [{"type": "function"}]}))
        assert list(other.token_ids[:4]) != list(first.token_ids[:4]), "tools stand before messages"


async def test_the_parts_of_a_body_that_matter_are_read() -> None:
    """Its limit, whether it streams, its salt, and an adapter if the model is the name of one."""
    reader = PromptReader(adapters=["poet"])
    prompt = await reader.read(CHAT_PATH, body(messages=TURNS, max_completion_tokens=7, stream=True, cache_salt="s"))
    assert (prompt.most_tokens, prompt.is_stream, prompt.salt) == (7, True, prefix_salt("", "s"))
    assert (await reader.read(CHAT_PATH, b'{"model": "poet"}')).salt == prefix_salt("poet", "")
    odd = await reader.read(CHAT_PATH, body(model=5, max_tokens="many", stream="yes", cache_salt=[]))
    assert odd == NO_PROMPT.__class__(NO_PROMPT.token_ids, prefix_salt("", ""), None, False)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"text"', b'{"messages": [}', b"\xff\xfe"])
async def test_a_body_that_is_no_json_object_is_a_value_error(raw: bytes) -> None:
    """The client is told so by the gateway, and no engine is asked."""
    with pytest.raises(ValueError):
        await PromptReader().read(CHAT_PATH, raw)


async def test_with_a_tokenizer_prompts_are_what_the_engine_computes() -> None:
    """The tokens of the rendered conversation, or of the text; other APIs, and what kvloom's edge would refuse, are
    placed by their bytes."""
    tokenizer = model_tokenizer()
    reader = PromptReader(tokenizer=tokenizer)
    text = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    chat = await reader.read(CHAT_PATH, body(messages=[{"role": "user", "content": "the fox"}]))
    assert list(chat.token_ids) == tokenizer.encode_now(text)
    assert list((await reader.read(COMPLETION_PATH, body(prompt="the dog"))).token_ids) == tokenizer.encode_now(
        "the dog"
    )
    assert list((await reader.read(COMPLETION_PATH, body(prompt=[5, 6, 7]))).token_ids) == [5, 6, 7]
    for path, fields in (("/v1/responses", {"input": "the dog"}), (CHAT_PATH, {"messages": "the dog"})):
        raw = body(**fields)
        assert await reader.read(path, raw) == await PromptReader().read(path, raw)
