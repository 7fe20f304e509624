"""The correct answers to the users' questions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from kvloom.client.client import Client
from kvloom.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from kvloom_common.text.tokenizer import ChatMessage, ModelTokenizer
from lab.chaos.clients.questions import Question
from lab.chaos.clients.transcript import Expected, ExpectedChoice
from shard_server.engines.sim_tokens import WORD_TOKEN_IDS, sequence_key, token_at
from shard_server.submits import choice_seed
from tools.failures import CommandError

_FINISH_REASONS: Final = {FINISH_REASON_STOP: "stop", FINISH_REASON_LENGTH: "length"}


class Oracle(Protocol):
    async def expected(self, question: Question) -> Expected: ...


async def prompt_ids_of(question: Question, tokenizer: ModelTokenizer) -> list[int]:
    if question.is_chat:
        said = [text for turn in question.earlier for text in turn]
        messages = [
            ChatMessage("assistant" if i % 2 else "user", text) for i, text in enumerate((*said, question.prompt))
        ]
        prompt, _ = await tokenizer.encode_chat(messages)
        return prompt.tolist()
    return (await tokenizer.encode(question.prompt)).tolist()


class SimOracle:
    """Computes the answers of the simulated engine without running it."""

    def __init__(self, tokenizer: ModelTokenizer, answer_seeds: Mapping[str, int]) -> None:
        """`answer_seeds`: `shard.sim.answer_seed` of each model. All have this tokenizer."""
        self._tokenizer = tokenizer
        self._answer_seeds = answer_seeds
        self._pieces = {token_id: tokenizer.decode([token_id]) for token_id in WORD_TOKEN_IDS}

    @property
    def words(self) -> Sequence[str]:
        """The words that answers consist of."""
        return list(self._pieces.values())

    async def expected(self, question: Question) -> Expected:
        prompt = await prompt_ids_of(question, self._tokenizer)
        return Expected(
            tuple(self._choice(question, prompt, choice_seed(question.seed, i)) for i in range(question.n)),
            num_prompt_tokens=len(prompt),
        )

    def _choice(self, question: Question, prompt: Sequence[int], seed: int) -> ExpectedChoice:
        key = sequence_key(prompt, seed, answer_seed=self._answer_seeds[question.model])
        token_ids = [token_at(key, position) for position in range(question.max_tokens)]
        return cut_at_stop(token_ids, [self._pieces[token_id] for token_id in token_ids], question.stop)


def cut_at_stop(token_ids: Sequence[int], pieces: Sequence[str], stop: Sequence[str]) -> ExpectedChoice:
    """An answer ends with the token that completes a stop string. Its text ends before the stop string."""
    text = ""
    lengths: list[int] = []
    for count, piece in enumerate(pieces, 1):
        text += piece
        found = min((at for at in map(text.find, stop) if at >= 0), default=None)
        if found is not None:
            lengths = [min(length, found) for length in (*lengths, len(text))]
            return ExpectedChoice(text[:found], tuple(token_ids[:count]), "stop", tuple(lengths))
        lengths.append(len(text))
    return ExpectedChoice(text, tuple(token_ids), "length", tuple(lengths))


class RecordedOracle:
    """Answers that a real engine gave before the first fault."""

    def __init__(self, answers: Mapping[Question, Expected]) -> None:
        self._answers = answers

    async def expected(self, question: Question) -> Expected:
        return self._answers[question]

    @classmethod
    async def record(cls, client: Client, questions: Sequence[Question], tokenizer: ModelTokenizer) -> RecordedOracle:
        """Ask every question once. Raises KvloomError or CommandError."""
        return cls({question: await _record_one(client, question, tokenizer) for question in questions})


async def _record_one(client: Client, question: Question, tokenizer: ModelTokenizer) -> Expected:
    prompt = await prompt_ids_of(question, tokenizer)
    token_ids: list[list[int]] = [[] for _ in range(question.n)]
    lengths: list[list[int]] = [[] for _ in range(question.n)]
    texts = [""] * question.n
    reasons = [""] * question.n
    async for delta in client.generate(
        model=question.model,
        token_ids=prompt,
        max_tokens=question.max_tokens,
        temperature=question.temperature,
        seed=question.seed,
        n=question.n,
        stop=question.stop,
    ):
        index = delta.index
        texts[index] += delta.text
        token_ids[index].extend(delta.token_ids)
        lengths[index].extend(itertools.repeat(len(texts[index]), len(delta.token_ids)))
        if delta.finish is not None:
            reasons[index] = _FINISH_REASONS.get(delta.finish.reason, "")
    if not all(reasons):
        raise CommandError("an answer failed before the first fault, so that there is nothing to compare with")
    choices = [ExpectedChoice(texts[i], tuple(token_ids[i]), reasons[i], tuple(lengths[i])) for i in range(question.n)]
    return Expected(tuple(choices), len(prompt))
