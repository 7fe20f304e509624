"""Measures how int8 weights change the answers: on a text that every Python has, and on a few greedy answers."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import Any, Final

import torch

from kvloom.text.tokenizer import ChatMessage, ModelTokenizer
from shard_server.engines.torch_engine.model_runner import ModelRunner, ScheduledSequence

_BLOCK_SIZE: Final = 16
_NUM_WINDOWS: Final = 6
_WINDOW_TOKENS: Final = 384
_ANSWER_TOKENS: Final = 64
_QUESTIONS: Final = (
    "What is the capital of France? Answer in one sentence.",
    "Name three colours.",
    "Why is the sky blue?",
    "Tell me about the history of the printing press.",
    "How do I boil an egg?",
    "Write one sentence about the sea.",
)


def measure_int8_quality(model_dir: Path, num_threads: int) -> dict[str, Any]:
    """Compare int8 with bfloat16. `greedy_tokens_agreeing` counts, for every question, the tokens of the two answers
    before the first difference; `greedy_answer_tokens` counts those of the bfloat16 answer. Raises EngineError."""
    tokenizer = ModelTokenizer.load(model_dir)
    topics = pydoc_data.topics.topics
    ids = tokenizer.encode_now("\n\n".join(topics[name] for name in sorted(topics)))
    stride = (len(ids) - _WINDOW_TOKENS) // (_NUM_WINDOWS - 1)
    windows = [ids[index * stride : index * stride + _WINDOW_TOKENS] for index in range(_NUM_WINDOWS)]
    prompts = [
        tokenizer.encode_now(tokenizer.render_chat([ChatMessage("user", question)]))[-_WINDOW_TOKENS:]
        for question in _QUESTIONS
    ]
    tokenizer.close()
    runners = [
        ModelRunner(
            model_dir,
            dtype="bfloat16",
            block_size=_BLOCK_SIZE,
            num_blocks=(_WINDOW_TOKENS + _ANSWER_TOKENS) // _BLOCK_SIZE + 1,
            max_model_len=_WINDOW_TOKENS + _ANSWER_TOKENS,
            num_threads=num_threads,
            int8_weights=int8_weights,
        )
        for int8_weights in (False, True)
    ]
    losses: list[list[float]] = [[], []]
    divergences: list[float] = []
    agreements: list[bool] = []
    for window in windows:
        wanted = torch.tensor(window[1:])[:, None]
        exact, rounded = (_log_probabilities(runner, window) for runner in runners)
        for own, log_probabilities in zip(losses, (exact, rounded), strict=True):
            own += (-log_probabilities.gather(1, wanted)[:, 0]).tolist()
        divergences += (exact.exp() * (exact - rounded)).sum(1).tolist()
        agreements += (exact.argmax(1) == rounded.argmax(1)).tolist()
    num_tokens = len(agreements)
    answers = [[_answer(runner, prompt) for runner in runners] for prompt in prompts]
    perplexity, perplexity_int8 = (torch.tensor(own).mean().exp().item() for own in losses)
    return {
        "num_tokens": num_tokens,
        "perplexity": round(perplexity, 3),
        "perplexity_int8": round(perplexity_int8, 3),
        "kl_divergence": round(sum(divergences) / num_tokens, 5),
        "top_1_agreement": round(sum(agreements) / num_tokens, 4),
        "greedy_answer_tokens": [len(exact) for exact, _ in answers],
        "greedy_tokens_agreeing": [_num_agreeing(*both) for both in answers],
    }


def _log_probabilities(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    """float32 [len(token_ids) - 1, vocab_size]: the distribution after every token but the last."""
    blocks = list(range(-(-len(token_ids) // _BLOCK_SIZE)))
    # All tokens but the first are drafts, so that there are logits after every token.
    logits = runner.run([ScheduledSequence(token_ids, 0, blocks, True, len(token_ids) - 1)])
    return torch.log_softmax(logits[:-1], -1)


def _answer(runner: ModelRunner, prompt: list[int]) -> list[int]:
    """A greedy answer, up to the end of the sequence."""
    known, num_computed = list(prompt), 0
    for _ in range(_ANSWER_TOKENS):
        blocks = list(range(-(-len(known) // _BLOCK_SIZE)))
        logits = runner.run([ScheduledSequence(known[num_computed:], num_computed, blocks, True)])
        num_computed = len(known)
        known.append(int(logits[0].argmax()))
        if known[-1] in runner.eos_token_ids:
            break
    return known[len(prompt) :]


def _num_agreeing(first: list[int], second: list[int]) -> int:
    same = [a == b for a, b in zip(first, second, strict=False)]
    return same.index(False) if False in same else len(same)
