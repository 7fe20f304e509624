"""The rule kind that looks for injections: what it reads of a prompt, and how it judges an embedding."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safety_svc.injections import MAX_CHARS, InjectionWeights, embedded_part, injection_weights


def test_the_weights_that_are_shipped_are_for_the_built_in_encoder() -> None:
    """It has 384 dimensions, and a rule names it by default."""
    shipped = injection_weights()
    assert (shipped.model, len(shipped.weights)) == ("all-MiniLM-L6-v2", 385)
    assert shipped.looks_like_an_attack(bytes(4 * 384)) in (True, False)


@pytest.mark.parametrize(("values", "found"), [((1.0, 0.0), True), ((0.0, 1.0), False), ((0.5, 0.5), False)])
def test_a_score_above_the_threshold_looks_like_an_attack(values: tuple[float, float], found: bool) -> None:
    """The score is linear, with a constant."""
    weights = InjectionWeights("m", (2.0, -2.0, 0.5), 0.5)
    assert weights.looks_like_an_attack(struct.pack("<2f", *values)) is found


@given(st.binary(max_size=20))
def test_what_is_no_embedding_of_the_encoder_is_no_judgement(embedding: bytes) -> None:
    """Neither a yes nor a no, and never an error."""
    found = InjectionWeights("m", (2.0, -2.0, 0.5), 0.5).looks_like_an_attack(embedding)
    assert (found is None) == (len(embedding) != 8)


def test_the_last_turn_of_a_prompt_is_read_without_markers() -> None:
    """The weights are trained on texts without them. A system prompt looks like an attack."""
    system = "<|im_start|>system\nYou are helpful.<|im_end|>\n"
    for end in ("", "<|im_start|>assistant\n", "<|im_start|>assistant"):
        assert embedded_part(f"{system}<|im_start|>user\nusers say hi<|im_end|>\n{end}") == "users say hi"
    assert embedded_part("<s>[INST] hi [/INST]") == "hi"
    assert embedded_part("<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n") == "hi"
    assert embedded_part(f"a plain text {'x' * MAX_CHARS}") == "x" * MAX_CHARS
    assert embedded_part("a plain text<|im_end|>") == "a plain text"
    assert embedded_part("<|im_end|>") == ""
