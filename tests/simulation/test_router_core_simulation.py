"""The router core under random faults: its invariants hold after every event, and everything ends.

A failing seed is replayed alone with the command that the failure prints; KVLOOM_SEED adds seeds, separated by spaces.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.router_core_world import World

NUM_ROUNDS = 120
SEEDS = list(dict.fromkeys([*range(100), *map(int, os.environ.get("KVLOOM_SEED", "").split())]))


@pytest.mark.parametrize("seed", SEEDS)
def test_core_survives_faults(seed: int) -> None:
    """Crashes, reincarnations, lost KV events, slow verdicts, cancellations and lost clients break no promise."""
    try:
        World(seed).run(NUM_ROUNDS)
    except Exception as error:
        error.add_note(
            f"replay: KVLOOM_SEED={seed} python -m pytest 'tests/simulation/test_router_core_simulation.py"
            f"::test_core_survives_faults[{seed}]'"
        )
        raise


def test_same_seed_same_history() -> None:
    """A failing seed can only be replayed if nothing depends on anything but the seed."""
    histories = []
    for _ in range(2):
        world = World(7)
        world.run(NUM_ROUNDS)
        histories.append((world.now, world.ended))
    assert histories[0] == histories[1]
