"""A SentencePiece vocabulary in a GGUF file cuts text as SentencePiece does."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvloom_common.text.tokenizer import ModelTokenizer
from shard_server.engines.base import EngineError
from shard_server.engines.torch_engine.checkpoint.gguf_tokenizer import build_tokenizer
from tests.examples import num_examples

CORPUS = "the cat sat on the mat and then the other cat ate the hat that the man had been eating in the sun " * 3


def trained_pieces() -> list[str]:
    """A small BPE vocabulary in the order of its scores."""
    words = Counter(tuple("▁" + word) for word in CORPUS.split())
    merged: list[str] = []
    while len(merged) < 60:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        merged.append(left + right)
        fresh: Counter[tuple[str, ...]] = Counter()
        for word, count in words.items():
            fresh[merge_all(word, left, right)] += count
        words = fresh
    return merged


def merge_all(word: tuple[str, ...], left: str, right: str) -> tuple[str, ...]:
    parts: list[str] = []
    for piece in word:
        if parts and parts[-1] == left and piece == right:
            parts[-1] = left + right
        else:
            parts.append(piece)
    return tuple(parts)


CONTROL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MERGED = trained_pieces()
LETTERS = sorted(set("▁abcdefghimnostu"))
TOKENS = CONTROL + BYTES + MERGED + LETTERS + ["<tool>"]
SCORES = [0.0] * (len(CONTROL) + 256) + [-float(rank) for rank in range(len(MERGED) + len(LETTERS))] + [0.0]
TYPES = (
    [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    + [TokenType.BYTE] * 256
    + [TokenType.NORMAL] * (len(MERGED) + len(LETTERS))
    + [TokenType.USER_DEFINED]
)


def reference(text: str) -> list[str]:
    """SentencePiece by its definition: merge the neighbours whose union scores highest, the leftmost of equal ones."""
    scores = dict(zip(MERGED + LETTERS, SCORES[len(CONTROL) + 256 :], strict=False))
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        candidates = [
            (-scores[left + right], index)
            for index, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in scores
        ]
        if not candidates:
            break
        _, index = min(candidates)
        pieces[index : index + 2] = ["".join(pieces[index : index + 2])]
    spelled: list[str] = []
    for piece in pieces:
        spelled += [piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return spelled


def fields(**changes: object) -> dict[str, object]:
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    out_dir = tmp_path_factory.mktemp("spm")
    build_tokenizer(Path("tiny.gguf"), fields(), out_dir)
    return Tokenizer.from_file(str(out_dir / "tokenizer.json"))


texts = st.text(st.sampled_from("the cansiomud  é日😀\n"), max_size=40)


@settings(max_examples=num_examples(200), deadline=None)
@given(text=texts)
def test_text_is_cut_as_sentence_piece_cuts_it(tokenizer: Tokenizer, text: str):
    """Merges stand in no GGUF file: they follow from the scores, and a wrong order gives tokens the model never saw."""
    assert tokenizer.encode(text, add_special_tokens=False).tokens == reference(text)


@settings(max_examples=num_examples(60), deadline=None)
@given(text=texts)
def test_text_survives(tokenizer: Tokenizer, text: str):
    """What no piece covers is spelled in bytes, not lost as an unknown token."""
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_and_the_beginning_are_found(tokenizer: Tokenizer):
    """A turn must end where the template says so, and Llama wants its beginning-of-sequence token."""
    encoding = tokenizer.encode("the cat</s><tool>")
    assert encoding.tokens[0] == "<s>"
    assert encoding.tokens[-2:] == ["</s>", "<tool>"]
    assert tokenizer.decode(encoding.ids) == "the cat<tool>", "what users defined is shown, what controls is not"


def test_without_the_space_in_front(tmp_path: Path):
    """Some vocabularies are trained without it."""
    build_tokenizer(Path("tiny.gguf"), fields(**{"tokenizer.ggml.add_space_prefix": False}), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("cat", add_special_tokens=False).tokens[0] != "▁cat"
    assert tokenizer.decode(tokenizer.encode("cat the").ids) == "cat the"


def test_the_servers_tokenizer_reads_it(tmp_path: Path):
    """Its exact bytes are what text is streamed from."""
    build_tokenizer(Path("tiny.gguf"), fields(), tmp_path)
    tokenizer = ModelTokenizer.load(tmp_path)
    ids = tokenizer.encode_now("the 日 hat")
    assert tokenizer.decode(ids) == " the 日 hat"
    assert tokenizer.token_bytes(TOKENS.index("<0xE6>")) == b"\xe6"
    tokenizer.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.scores": SCORES[:-1]}, "scores"),
        ({"tokenizer.ggml.token_type": TYPES[:-1]}, "types"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], "▁the"]}, "there twice"),
        ({"tokenizer.ggml.tokens": ["<unk>", *(f"x{token}" for token in TOKENS[1:])]}, "byte tokens are missing"),
        ({"tokenizer.ggml.model": "t5"}, "'t5' is not supported"),
        ({"tokenizer.ggml.unknown_token_id": 10**6}, "damaged"),
    ],
)
def test_a_vocabulary_that_cannot_be_right_is_refused(tmp_path: Path, changes: dict[str, object], message: str):
    """Text cut wrongly gives fluent nonsense, which no error would tell."""
    with pytest.raises(EngineError, match=message):
        build_tokenizer(Path("tiny.gguf"), fields(**changes), tmp_path)
