"""Thousands of answers at once whose safety service is killed, hangs and sends garbage: is a character shown that it
has not judged?

Router and shard are in this process, and clients and the safety service in one each: in a single one, ten thousand
answers leave no time to answer pings, and streams between the parts break.
"""

from __future__ import annotations

import asyncio
import dataclasses
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lab.free_ports import pick_free_ports
from lab.redteam.clients import SeenAnswers, ask
from lab.redteam.echo_engine import MAX_PARTS
from lab.redteam.fabric import echo_fabric
from lab.redteam.faults import SafetyEnd, break_safety
from lab.redteam.processes import SharedState, process_pool
from lab.redteam.rules import policy_text

_STEP_SECONDS: Final = 0.02
_STEP_SECONDS_PER_STREAM: Final = 0.00025
"""More than it takes to compute: router and shard share one event loop."""
_MAX_SECONDS: Final = 1800.0
_POLL_SECONDS: Final = 0.005
_EVERYTHING: Final = """
[[rules]]
name = "everything"
message = "This is found nowhere."
patterns = ['\\x01{9}']
max_length = 9
"""
"""A rule whose matches begin anywhere, so that routers clear nothing by themselves: each character needs a verdict."""


@dataclasses.dataclass(frozen=True, slots=True)
class OutageReport:
    """Says what clients have seen, and which faults there were."""

    seen: SeenAnswers
    faults: dict[str, int]
    max_rss_mb: float
    """The memory of all processes together."""

    @property
    def summary(self) -> str:
        """One paragraph."""
        seen = self.seen
        return (
            f"{seen.num_streams:,} answers at once, and {sum(self.faults.values())} faults ({_listed(self.faults)}): "
            f"{seen.num_chars:,} characters shown, {seen.num_unjudged_chars} without a verdict, "
            f"{seen.num_leaked_chars} of forbidden texts. {_listed(seen.fates).capitalize()}; {len(seen.wrong)} not as "
            f"without faults. At most {self.max_rss_mb:,.0f} MB, fabric and clients together."
        )


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


async def run_outages(redis_url: str, folder: Path, num_streams: int, seed: int = 0) -> OutageReport:
    """Ask for so many answers at once, and look at them until the last has ended. Raises TimeoutError."""
    policy = folder / "policy.toml"
    policy.write_text(policy_text() + _EVERYTHING, encoding="utf-8")
    [safety_port] = pick_free_ports(1)
    step_seconds = _STEP_SECONDS + _STEP_SECONDS_PER_STREAM * min(num_streams, MAX_PARTS)
    state, loop = SharedState(num_streams), asyncio.get_running_loop()
    with process_pool(2, state) as pool:
        safety: asyncio.Future[SafetyEnd] = loop.run_in_executor(pool, break_safety, policy, safety_port, seed)
        try:
            async with asyncio.timeout(_MAX_SECONDS):
                await _until(state.safety_listens.is_set, safety)
                async with echo_fabric(redis_url, policy, safety_port, step_seconds) as fabric:
                    engine = fabric.engine
                    engine.may_write.clear()
                    asked = loop.run_in_executor(pool, ask, fabric.router_address, num_streams)

                    def have_ended() -> bool:
                        state.num_taken.value = engine.num_submitted
                        if state.may_write.is_set():
                            engine.may_write.set()
                        return asked.done()

                    await _until(have_ended, safety)
                    seen = await asked
        finally:
            state.is_over.set()
        end = await safety
    own_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return OutageReport(seen, dict(end.faults), own_mb + seen.max_rss_mb + end.max_rss_mb)


async def _until(condition: Callable[[], bool], process: asyncio.Future[Any]) -> None:
    """Return when the condition holds (there are no events between processes). Raises what has ended the process
    before."""
    while not condition():
        if process.done():
            raise RuntimeError(f"the safety service's process has ended: {process.result()}")
        await asyncio.sleep(_POLL_SECONDS)
