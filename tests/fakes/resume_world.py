"""Helpers that the tests of resumable streams share."""

from __future__ import annotations

from typing import Any

from kvloom_common.config import KvloomConfig
from kvloom_common.replay.stream_retention import ResumeSettings
from tests.fakes.edge_world import EdgeWorld
from tests.fakes.resuming_client import ResumingClient
from tests.waiting import eventually

CHAT = "/v1/chat/completions"


def client(world: EdgeWorld, path: str = CHAT, key: str = "secret") -> ResumingClient:
    return ResumingClient(world.url + path, {"Authorization": f"Bearer {key}"})


def config(**resume: Any) -> KvloomConfig:
    return KvloomConfig(resume=ResumeSettings(**resume))


async def unattended(world: EdgeWorld, count: int = 1) -> None:
    """Return once exactly that many responses have no reader."""
    await eventually(lambda: sum(not stream.is_attended for stream in world.edge.resume.streams.values()) == count)


async def metric(world: EdgeWorld, name: str) -> float:
    """The value of one sample, as Prometheus would scrape it."""
    async with world.http.get(f"{world.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[1])
