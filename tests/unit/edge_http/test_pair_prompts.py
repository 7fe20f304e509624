"""The prompts of pairs of texts, which a cross-encoder compares."""

from __future__ import annotations

from array import array

import pytest

from edge_http.openai import embeddings
from kvloom.errors import KvloomError
from kvloom_common.text.tokenizer import ModelTokenizer
from tests.fakes.tiny_tokenizer import byte_level_tokenizer

NUM_DOCUMENTS = 2048


class CountingTokenizer(ModelTokenizer):
    """Counts the tokens that it has made."""

    num_tokens = 0

    async def encode_pair(self, first: str, second: str, *, scope: str | None = None) -> array[int]:
        token_ids = await super().encode_pair(first, second, scope=scope)
        self.num_tokens += len(token_ids)
        return token_ids


async def test_a_long_query_is_not_read_again_for_each_of_many_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of a few kilobytes would else take minutes and gigabytes before it is refused."""
    monkeypatch.setattr(embeddings, "MAX_TOKENS", 3000)
    tokenizer = CountingTokenizer(byte_level_tokenizer())
    query = "the quick brown fox " * 50
    pairs, fields = [(query, "dog")] * NUM_DOCUMENTS, [f"documents[{i}]" for i in range(NUM_DOCUMENTS)]
    try:
        with pytest.raises(KvloomError) as caught:
            await embeddings.pair_prompts(pairs, fields, tokenizer, len(query), scope="")
        assert caught.value.reason_name == "REQUEST_TOO_LARGE"
        assert tokenizer.num_tokens < embeddings.MAX_TOKENS + len(query)
    finally:
        tokenizer.close()
