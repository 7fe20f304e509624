"""How processes are stopped."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

PROGRAM = """
import asyncio, os, signal, sys
from kvloom_common.process.service import stop_event

async def main():
    stop = stop_event()
    for name in sys.argv[1:]:
        os.kill(os.getpid(), getattr(signal, name))
        await asyncio.wait_for(stop.wait(), 5)
        await asyncio.to_thread(os.getpid)  # a few turns of the loop

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("signals", "finishes"),
    [
        (["SIGTERM"], True),
        (["SIGINT"], True),
        (["SIGTERM", "SIGTERM", "SIGTERM"], True),
        (["SIGINT", "SIGTERM"], True),
        (["SIGINT", "SIGINT"], False),
        (["SIGTERM", "SIGINT"], False),
    ],
)
def test_only_an_impatient_person_ends_a_process_at_once(signals: list[str], finishes: bool) -> None:
    """A supervisor may send SIGTERM twice; the process still hands its requests over."""
    command = [sys.executable, "-c", PROGRAM, *signals]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30)
    assert (run.returncode == 0) == finishes, run.stderr
