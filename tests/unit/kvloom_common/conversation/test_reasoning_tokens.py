"""Tokens of reasoning, counted from the tokens of an ended answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.conversation.reasoning_tokens import CHUNK_TOKENS, ReasoningCounter
from kvloom_common.parsers.events import ReasoningTally
from kvloom_common.parsers.output_parser import make_parser
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from tests.fakes.tiny_tokenizer import model_tokenizer

TOKENIZER = model_tokenizer()
QWEN, HARMONY = ParserSpec(reasoning="qwen3"), ParserSpec(reasoning="harmony")


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode_now(text)


def one_by_one(spec: ParserSpec, token_ids: list[int]) -> int:
    """What an edge counts that gets each token in an update of its own."""
    parser, tally = make_parser(spec), ReasoningTally(starts_in_reasoning=spec.starts_in_reasoning)
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    for token_id in token_ids:
        text = detokenizer.push([token_id])
        tally.add(parser.feed(text) if text else [], 1)
    return tally.num_tokens


def test_an_answer_without_markers_has_none() -> None:
    """Otherwise all of an answer could be charged as reasoning."""
    assert ReasoningCounter(QWEN, TOKENIZER, tokens("hi"))(tokens("the answer " * 100)) == 0


def test_all_tokens_up_to_the_end_of_the_reasoning_count() -> None:
    """Whether the prompt or the answer has begun the reasoning, and also when the answer ends within it."""
    inside, after = tokens("the fox jumps " * 50), tokens("</think>") + tokens("the dog " * 50)
    by_prompt = ReasoningCounter(QWEN, TOKENIZER, tokens("assistant\n<think>\n"))
    assert by_prompt(inside) == len(inside)
    assert by_prompt(inside + after) == len(inside) + len(tokens("</think>"))
    by_answer = ReasoningCounter(QWEN, TOKENIZER, tokens("assistant\n"))
    assert by_answer(tokens("<think>") + inside) == len(inside)


PIECES = st.sampled_from(
    ["<think>", "</think>", "the fox ", "日本語", "\n", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>",
     "<|end|>", "<|start|>assistant", "over it " * CHUNK_TOKENS]
)  # fmt: skip


@pytest.mark.parametrize("spec", [QWEN, HARMONY])
@given(pieces=st.lists(PIECES, max_size=12))
def test_the_count_is_that_of_single_tokens(spec: ParserSpec, pieces: list[str]) -> None:
    """Chunks are only a shortcut: what is metered must not depend on where they begin."""
    token_ids = [token_id for piece in pieces for token_id in tokens(piece)]
    assert ReasoningCounter(spec, TOKENIZER, ())(token_ids) == one_by_one(spec, token_ids)
