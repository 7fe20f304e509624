"""The ids from cached words and blocks are those of the plain tokenizer, for every text."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvloom_common.text.tokenization_cache import _KNOWN_SPLITS, PieceCache, PieceRules, TextEncoding
from tests.examples import num_examples

PARTS = [
    *" \n\t.,'5é\u0301\u200b中ßA-!<|>", "  ", " \n", "the", " quick", "brown ", "fox's", " 1234", "it'S", "a.b", "...",
    "<|im_start|>", "<|im_end|>", "<|im_", "start|>", "user\n", "ﬁ", " a", " b", "c", "x y", "\u00a0", "\r\n",
    "end. The", "2024-11-21", "12", "1a2", "\u0661", "é1",
]  # fmt: skip
texts = st.lists(st.sampled_from(PARTS), max_size=60).map("".join)


def byte_tokenizer(expression: str | None, *, normalized: bool = False) -> Tokenizer:
    """A tokenizer with merges across letters, digits and a leading space, as large models have."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "a"),
        ("Ġ", "q"),
        ("1", "2"),
        ("Ġ", "1"),
        ("f", "o"),
        ("fo", "x"),
        ("Ġ", "Ġ"),
    ]
    merges += [(".", "."), ("Ġ", "b"), ("'", "s"), ("u", "s"), ("e", "r")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    if normalized:
        tokenizer.normalizer = normalizers.NFC()
    if expression is None:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


TOKENIZERS = [byte_tokenizer(None), *(byte_tokenizer(split, normalized=True) for split in sorted(_KNOWN_SPLITS))]


@functools.cache
def built_in(model_dir: Path) -> tuple[Tokenizer, PieceRules]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return tokenizer, PieceRules(tokenizer)


def encoding_of(cache: PieceCache, text: str) -> TextEncoding:
    encoding = TextEncoding(cache)
    for _ in cache.fill(encoding, text):
        pass
    return encoding


def ids_by_pieces(cache: PieceCache, tokenizer: Tokenizer, text: str) -> list[int]:
    encoding = encoding_of(cache, text)
    return encoding.ids([tokenizer.encode(piece, add_special_tokens=False).ids for piece in encoding.misses]).tolist()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes several blocks of short texts."""
    monkeypatch.setattr("kvloom_common.text.tokenization_cache.BLOCK_CHARS", 8)


@settings(max_examples=num_examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(range(len(TOKENIZERS))), st.lists(texts, min_size=1, max_size=5))
@example(0, ["the quick the  quick", " the", "  the quick", "end. The fox"])
def test_pieces_give_the_plain_tokenizers_ids(which: int, several: list[str]) -> None:
    """This holds for any earlier texts in the cache, and for any cuts."""
    tokenizer = TOKENIZERS[which]
    cache = PieceCache(PieceRules(tokenizer), max_bytes=2000, max_words=20)
    for text in several:
        expected = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids_by_pieces(cache, tokenizer, text) == expected
        assert ids_by_pieces(cache, tokenizer, text) == expected
        assert cache.num_bytes <= 2000


@settings(max_examples=num_examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(texts, min_size=1, max_size=4))
def test_the_built_in_models_tokenizer_agrees(model_dir: Path, several: list[str]) -> None:
    """The model that most tests and demos use, with its own vocabulary and special tokens."""
    tokenizer, rules = built_in(model_dir)
    assert rules.cuts_words
    assert rules.cuts_digits
    cache = PieceCache(rules)
    for text in several:
        assert ids_by_pieces(cache, tokenizer, text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_repeated_prefix_is_not_encoded_again(model_dir: Path) -> None:
    """Of a second prompt with the same beginning only the new words are encoded."""
    tokenizer, rules = built_in(model_dir)
    cache = PieceCache(rules)
    prefix = "<|im_start|>user\n" + "Some words that everybody sends. " * 20
    ids_by_pieces(cache, tokenizer, prefix + "one")
    encoding = encoding_of(cache, prefix + "unheard")
    assert sum(map(len, encoding.misses)) < 40


def test_a_new_number_is_not_encoded(model_dir: Path) -> None:
    """Ids, dates and amounts are new in every prompt; where each digit is a token, the cache knows them all."""
    tokenizer, rules = built_in(model_dir)
    cache = PieceCache(rules)
    ids_by_pieces(cache, tokenizer, "<|im_start|>user\n1234567890 and 10 20 30")
    assert not encoding_of(cache, "<|im_start|>user\n1750936428 and 2073 and 10385").misses


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}},
        {"normalizer": {"type": "Lowercase"}},
    ],
)
def test_what_is_not_known_to_be_safe_is_not_cut(change: dict[str, object]) -> None:
    """A tokenizer of another kind is only cut at its special tokens."""
    description = json.loads(TOKENIZERS[0].to_str()) | change
    tokenizer = Tokenizer.from_str(json.dumps(description))
    rules = PieceRules(tokenizer)
    assert not rules.cuts_words
    assert rules.blocks("a<|im_end|>b") == ["a", "<|im_end|>b"]
