"""Workloads for tests of the simulator."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from tools.simulate.workload import Call


class ListedWorkload:
    """Calls at given times; each call's followers come a given time after its end."""

    def __init__(
        self,
        arrivals: Sequence[tuple[float, Call]],
        block_size: int,
        followers: dict[int, tuple[float, Call]] | None = None,
    ) -> None:
        self.block_size = block_size
        self._arrivals = arrivals
        self._followers = followers or {}

    def first_calls(self) -> Iterable[tuple[float, Call]]:
        return self._arrivals

    def next_calls(self, ended: Call, now: float) -> Iterable[tuple[float, Call]]:
        if ended.call_id in self._followers:
            think_seconds, call = self._followers[ended.call_id]
            yield now + think_seconds, call


def conversations(
    num_conversations: int, num_turns: int, *, block_size: int, calls_per_second: float, seed: int = 0
) -> ListedWorkload:
    """Open loop: turns of conversations that share a system prompt, each turn extending the one before."""
    rng = random.Random(seed)
    contexts = [[*range(4), *(1000 * (i + 1) + n for n in range(rng.randint(1, 8)))] for i in range(num_conversations)]
    arrivals: list[tuple[float, Call]] = []
    now = 0.0
    for call_id in range(num_conversations * num_turns):
        now += rng.expovariate(calls_per_second)
        index = rng.randrange(num_conversations)
        context = contexts[index]
        first_new = 1000 * (index + 1) + 100 + len(context)
        context.extend(range(first_new, first_new + rng.randint(0, 5)))
        num_prompt_tokens = len(context) * block_size + rng.randint(1, block_size - 1)
        arrivals.append((now, Call(call_id, num_prompt_tokens, rng.randint(1, 200), tuple(context), str(index))))
    return ListedWorkload(arrivals, block_size)
