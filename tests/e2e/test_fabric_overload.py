"""More requests than the shards can serve, live: they serve what they can, and the rest is refused at once."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from tests.e2e.fabric import RunningFabric

pytestmark = pytest.mark.xdist_group("models")

MODEL = "narrow"
"""Its one shard runs four answers at a time."""
DEADLINE = {"x-kvloom-deadline-ms": "4000"}

DRAINED_SECONDS = 4.0
"""What was admitted has ended by then, or has met its deadline."""


@pytest.fixture
def fabric(models_fabric: RunningFabric) -> RunningFabric:
    return models_fabric


class Load:
    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = f"{url}/v1/chat/completions"
        self.num_sent = 0
        self.good_at: list[float] = []
        self.refused_after: list[float] = []
        self.others: list[tuple[int, str]] = []

    async def one(self, **fields: object) -> None:
        self.num_sent += 1
        message = {"role": "user", "content": f"request {self.num_sent}"}
        body = {"model": MODEL, "max_tokens": 20, "messages": [message], **fields}
        began = time.monotonic()
        async with self._http.post(self._url, json=body, headers=DEADLINE) as response:
            answer = await response.json()
        seconds = time.monotonic() - began
        if response.status == 200:
            self.good_at.append(time.monotonic())
        elif response.status == 429:
            assert answer["error"]["code"] == "queue_full"
            assert 1 <= int(response.headers["Retry-After"]) <= 60
            assert float(response.headers["retry-after-ms"]) > 0
            self.refused_after.append(seconds)
        else:
            self.others.append((response.status, answer["error"]["code"]))

    async def closed(self, num_users: int, seconds: float) -> float:
        """Answers a second when the fleet always has enough to do."""
        end = time.monotonic() + seconds

        async def user() -> None:
            while time.monotonic() < end:
                await self.one()

        await asyncio.gather(*(user() for _ in range(num_users)))
        steady = [at for at in self.good_at if end - 0.75 * seconds <= at < end]
        return len(steady) / (0.75 * seconds)

    async def open(self, rate: float, seconds: float) -> None:
        """Requests come whatever becomes of those before."""
        async with asyncio.TaskGroup() as tasks:
            begin = time.monotonic()
            for number in range(int(rate * seconds)):
                await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))  # sleep: the rate
                tasks.create_task(self.one())


@pytest.mark.long
async def test_three_times_capacity(fabric: RunningFabric) -> None:
    """Goodput stays, and a refusal comes at once. (The simulation measures it exactly; here the machine is shared.)"""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=30)) as http:
        capacity = await Load(http, fabric.http_url).closed(num_users=8, seconds=4.0)
        assert capacity > 2
        load = Load(http, fabric.http_url)
        begin = time.monotonic()
        await load.open(3 * capacity, seconds=10.0)
        steady = [at for at in load.good_at if 4.0 <= at - begin < 10.0]
        assert len(steady) / 6.0 >= 0.7 * capacity, (capacity, len(steady) / 6.0, load.others)
        assert len(load.refused_after) > load.num_sent / 4
        # All but the first, which were admitted before there was any evidence.
        assert set(load.others) <= {(408, "queue_timeout"), (504, "deadline_exceeded")}
        assert len(load.others) < load.num_sent / 4
        assert sorted(load.refused_after)[len(load.refused_after) // 2] < 1.0
        # After the overload the next request is served.
        after = Load(http, fabric.http_url)
        async with asyncio.timeout(DRAINED_SECONDS):
            while not after.good_at:
                await after.one()


@pytest.mark.long  # it judges a clock
@pytest.mark.parametrize(("seconds", "ratio"), [(2.0, 2), (5.0, 5)])
async def test_what_can_wait_waits(fabric: RunningFabric, seconds: float, ratio: int) -> None:
    """While urgent requests keep the fleet busy, those of the lower tier are the ones that are refused. Some
    of them are served at first, of which the longer run has relatively fewer."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=30)) as http:
        urgent, batch = Load(http, fabric.http_url), Load(http, fabric.http_url)
        end = time.monotonic() + seconds

        async def user(load: Load, **fields: object) -> None:
            while time.monotonic() < end:
                before = len(load.good_at)
                await load.one(**fields)
                if len(load.good_at) == before:
                    await asyncio.sleep(0.1)  # sleep: refused: no busy loop

        urgents = [user(urgent) for _ in range(16)]
        batches = [user(batch, service_tier="flex") for _ in range(16)]
        await asyncio.gather(*urgents, *batches)
        assert len(urgent.good_at) > ratio * len(batch.good_at)
        share_refused = (len(urgent.refused_after) + len(urgent.others)) / urgent.num_sent
        assert share_refused < 0.2
