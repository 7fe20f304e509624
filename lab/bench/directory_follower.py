"""`python -m lab.bench.directory_follower PORT FOLDER`: follows the table of tenants as an edge or a router does, and
prints a line of JSON for each snapshot. A process of its own, whose memory and event loop are otherwise idle."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any, Final

import uvloop

from kvloom_common.access.tenant_follower import TenantFollower
from kvloom_common.config import ControlConfig, KvloomConfig
from kvloom_common.process.service import settle_memory
from kvloom_common.process.telemetry import configure_logging
from kvloom_common.process.watched_files import following
from kvloom_common.trust.fabric_trust import NO_SECRET
from tools.process_counters import rss_bytes

PERIOD_SECONDS: Final = 0.001
SETTLE_SECONDS: Final = 5.0
"""From the end of a snapshot until the memory is read."""


class Stalls:
    """How long the event loop was held up, beyond the period of its probe."""

    def __init__(self) -> None:
        self.longest_seconds = self.longest_cpu_seconds = 0.0

    async def watch(self) -> None:
        while True:
            at, cpu_at = time.perf_counter(), time.thread_time()
            await asyncio.sleep(PERIOD_SECONDS)
            self.longest_seconds = max(self.longest_seconds, time.perf_counter() - at - PERIOD_SECONDS)
            self.longest_cpu_seconds = max(self.longest_cpu_seconds, time.thread_time() - cpu_at)


async def run(port: int, folder: str) -> None:
    config = KvloomConfig(data_dir=folder, control=ControlConfig(enabled=True, host="127.0.0.1", port=port))
    configure_logging(config.log, "follower")  # to stderr
    follower = TenantFollower(config, "follower", NO_SECRET)
    changed = asyncio.Event()
    follower.tenants.on_change(changed.set)
    settle_memory()  # as services do when they are ready
    before = rss_bytes([os.getpid()])
    async with following(follower):
        while True:
            stalls, at, cpu_at = Stalls(), time.perf_counter(), time.process_time()
            watching = asyncio.create_task(stalls.watch(), name="stalls")
            await changed.wait()
            changed.clear()
            row: dict[str, Any] = {
                "seconds": round(time.perf_counter() - at, 2),
                "cpu_seconds": round(time.process_time() - cpu_at, 2),
                "num_keys": follower.tenants.table.num_keys,
            }
            await asyncio.sleep(SETTLE_SECONDS)
            watching.cancel()
            row["longest_stall_ms"] = round(stalls.longest_seconds * 1e3, 1)
            row["longest_stall_cpu_ms"] = round(stalls.longest_cpu_seconds * 1e3, 1)
            row["resident_mib"] = round((rss_bytes([os.getpid()]) - before) / 2**20)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    uvloop.run(run(int(sys.argv[1]), sys.argv[2]))
