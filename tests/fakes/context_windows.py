"""How much of its prompts a conversation finds in the prefix cache, by how it is kept within the model's window."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvloom.text.chat_message import ChatMessage
from kvloom_common.text.block_hash import block_hashes, root_hash

Choose = Callable[[Sequence[ChatMessage], Sequence[int]], Sequence[ChatMessage]]
"""The messages of a prompt, of all with their tokens."""
_BLOCK_SIZE: Final = 16


def sliding(room: int) -> Choose:
    """Leaves out as few turns as possible."""

    def choose(messages: Sequence[ChatMessage], sizes: Sequence[int]) -> Sequence[ChatMessage]:
        first, total = 1, sum(sizes)
        while total > room:
            left_out = sizes[first : first + 2]
            total, first = total - sum(left_out), first + 2
        return [messages[0], *messages[first:]]

    return choose


def conversation(num_turns: int, rng: random.Random) -> list[tuple[ChatMessage, Sequence[int]]]:
    """Messages with their tokens, as many as chats have: questions of 120 tokens and answers of 250, in the median."""
    lengths = [300]
    for _ in range(num_turns):
        lengths += [round(rng.lognormvariate(math.log(median), 0.8)) + 1 for median in (120, 250)]
    roles = ["system", *["user", "assistant"] * num_turns]
    ids = [[rng.randrange(1 << 16) for _ in range(length)] for length in lengths]
    return [(ChatMessage(role, str(number)), ids[number]) for number, role in enumerate(roles)]


def measured(talks: Sequence[Sequence[tuple[ChatMessage, Sequence[int]]]], choose: Choose) -> dict[str, Any]:
    """The prompts of all turns, each against a cache that has all earlier ones and their answers."""
    num_tokens = num_cached = longest = 0
    root = root_hash("model")
    for talk in talks:
        known: set[int] = set()
        ids = dict(talk)
        for end in range(2, len(talk), 2):
            messages = [message for message, _ in talk[:end]]
            chosen = choose(messages, [len(ids[message]) for message in messages])
            prompt = [token for message in chosen for token in ids[message]]
            hashes = block_hashes(prompt, _BLOCK_SIZE, root)
            found = next((number for number, block in enumerate(hashes) if block not in known), len(hashes))
            num_tokens, num_cached = num_tokens + len(prompt), num_cached + found * _BLOCK_SIZE
            longest = max(longest, len(prompt))
            known.update(block_hashes([*prompt, *talk[end][1]], _BLOCK_SIZE, root))
    cost = {"prompt_tokens": num_tokens, "computed_tokens": num_tokens - num_cached, "longest_prompt": longest}
    return {"hit_rate": num_cached / num_tokens, **cost}
