"""The tokenizer built from GGUF metadata cuts text as the model's own does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.examples import num_examples


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            "Hello world 1234 it's  fine\n\nüñ 😀 日本",
            [
                19556,
                905,
                216,
                33,
                34,
                35,
                36,
                357,
                506,
                216,
                4979,
                198,
                198,
                7170,
                10214,
                40303,
                218,
                17097,
                241,
                115,
                40993,
            ],
        ),
        ("def f(x):\n    return x+1\n", [1604, 275, 24, 104, 727, 472, 1003, 1792, 27, 33, 198]),
        ("a  b   c\t\td 12 34", [81, 216, 278, 256, 265, 197, 197, 84, 216, 33, 34, 216, 35, 36]),
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
    ],
)
def test_encodings_are_those_that_transformers_gives_for_the_same_file(tokenizer: Tokenizer, text: str, ids: list[int]):
    """Digits, spaces and special tokens are where pre-tokenizers differ. (As transformers 5.23 reads it.)"""
    assert tokenizer.encode(text).ids == ids


# The model's vocabulary lacks the bytes that only some control characters and unassigned planes need.
known_text = st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=("Cs", "Cc")), max_size=60)


@settings(max_examples=num_examples(80), deadline=None)
@given(text=known_text)
def test_every_text_survives_encoding_and_decoding(tokenizer: Tokenizer, text: str):
    """Byte-level BPE covers Unicode: nothing may get lost or become an unknown token."""
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
