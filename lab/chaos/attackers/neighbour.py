"""Starts the attackers' process, and reads its tally."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from typing import Final

import msgspec

from lab.chaos.attackers.targets import Targets
from tools.supervisor.child import bound_command

_MORE_SECONDS: Final = 30.0
"""For the start and the end of the process."""


class AttackOrder(msgspec.Struct, frozen=True):
    targets: Targets
    seed: int
    seconds: float
    names: list[str] = []
    """The attacks; all of them if it is empty."""


async def attack(order: AttackOrder) -> dict[str, int]:
    """Attack for so long. Returns how often each attack was answered in which way. The process dies with this one.
    Raises ChildProcessError if it fails, and TimeoutError if it does not end."""
    command = bound_command((sys.executable, "-P", "-m", "lab.chaos.attackers"))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE, process_group=0)
    try:
        async with asyncio.timeout(order.seconds + _MORE_SECONDS):
            tally, errors = await process.communicate(msgspec.json.encode(order))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-3:]
        raise ChildProcessError(f"the attackers ended with status {process.returncode}: {' '.join(last)}")
    return msgspec.json.decode(tally, type=dict[str, int])
