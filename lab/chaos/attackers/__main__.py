"""`python -m lab.chaos.attackers`: reads an AttackOrder from stdin, attacks, and prints the tally.

The attackers are a process of their own, so that the users' clients are not slowed down by their work. It has the
lowest priority: attackers have machines of their own, and would not take the fabric's CPUs away from it.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from lab.chaos.attackers.mix import attack_all
from lab.chaos.attackers.neighbour import AttackOrder


def main() -> None:
    os.nice(19)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=AttackOrder)
    tally = asyncio.run(attack_all(order.targets, order.seed, order.seconds, order.names))
    sys.stdout.buffer.write(msgspec.json.encode(tally) + b"\n")


if __name__ == "__main__":
    main()
