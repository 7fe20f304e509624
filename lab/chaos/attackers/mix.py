"""The attackers' mix: all attacks at once, each again and again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from typing import Final

from lab.chaos.attackers import greedy, grpc, inside, malformed
from lab.chaos.attackers.targets import Attack, Targets

ATTACKS: Final[tuple[tuple[Callable[[Attack], Awaitable[None]], float], ...]] = (
    (malformed.slow_headers, 1.0),
    (malformed.smuggling, 1.0),
    (malformed.large_bodies, 4.0),
    (malformed.guide_bombs, 4.0),
    (malformed.connection_flood, 5.0),
    (greedy.unread_streams, 2.0),
    (greedy.many_choices, 2.0),
    (greedy.large_answers, 5.0),
    (grpc.compressed_messages, 2.0),
    (grpc.malformed_messages, 2.0),
    (grpc.rapid_resets, 2.0),
    (grpc.guessed_names, 1.0),
    (inside.noise, 3.0),
    (inside.registry_without_password, 3.0),
)
"""Each with the seconds between its end and its next beginning."""


ATTACK_NAMES: Final = tuple(run.__name__ for run, _ in ATTACKS)


async def attack_all(targets: Targets, seed: int, seconds: float, names: Collection[str] = ()) -> dict[str, int]:
    """Returns how often each attack was answered in which way. Attacks that still run at the end are broken off. With
    `names`, only these attacks."""
    tally: Counter[str] = Counter()

    async def repeat(run: Callable[[Attack], Awaitable[None]], pause_seconds: float) -> None:
        rng = random.Random(f"{run.__name__} {seed}")
        attack = Attack(targets, rng, tally, run.__name__)
        await asyncio.sleep(rng.random() * min(1.0, pause_seconds))
        while True:
            attack.note("begun")
            try:
                await run(attack)
            except OSError as error:  # the fabric put an end to it
                attack.note(type(error).__name__)
            await asyncio.sleep(pause_seconds)

    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as attacks:
            for run, pause_seconds in ATTACKS:
                if names and run.__name__ not in names:
                    continue
                attacks.create_task(repeat(run, pause_seconds), name=run.__name__)
    except TimeoutError:
        pass
    return dict(sorted(tally.items()))
