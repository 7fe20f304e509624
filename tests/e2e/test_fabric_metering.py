"""Metering of a whole fabric, whose processes are killed under load: what was metered is what was delivered."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.fabric import RunningFabric, eventually, run_kvloom

MODEL = "smollm2-135m-instruct"
NUM_CLIENTS = 12
PAUSE_SECONDS = 3.0
"""Between two kills: long enough for the process to be back and to work."""
KILLED = ("router-0", "control", "redis", "router-1", "control")
CONFIG = """
[control]
enabled = true
witness = true
"""


@pytest.fixture
def fabric(model_dir: Path, tmp_path: Path) -> Any:
    del model_dir
    config = tmp_path / "kvloom.toml"
    config.write_text(CONFIG)
    args = ("--config", str(config), "--engine", "sim", "--sim-step-ms", "10", "--routers", "2")
    running = RunningFabric.start(tmp_path / "data", *args)
    yield running
    running.stop()


def kvloom(fabric: RunningFabric, *args: str) -> str:
    done = run_kvloom(*args, env=fabric.env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Load:
    """Clients that stream and collect answers until `stop` is set."""

    def __init__(self, fabric: RunningFabric, key: str) -> None:
        self._url = fabric.http_url + "/v1/chat/completions"
        self._headers = {"authorization": f"Bearer {key}"}
        self.stop = asyncio.Event()
        self.num_complete = 0

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as http:
            await asyncio.gather(*(self._client(http, number) for number in range(NUM_CLIENTS)))

    async def _client(self, http: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while not self.stop.is_set():
            turn += 1
            body = {
                "model": MODEL,
                "stream": turn % 3 > 0,
                "max_tokens": 20 + 17 * (number + turn) % 200,
                "n": 1 + (number + turn) % 2,
                "messages": [{"role": "user", "content": f"client {number} asks for turn {turn}"}],
            }
            try:
                async with http.post(self._url, json=body, headers=self._headers) as response:
                    if turn % 7 == 0:
                        await response.content.readany()  # and leave in the middle
                        continue
                    text = await response.read()
                    is_complete = response.status == 200 and (b"[DONE]" in text or not body["stream"])
                    self.num_complete += is_complete
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)


def kill(fabric: RunningFabric, name: str) -> None:
    [pid] = [process["pid"] for process in fabric.processes() if process["name"] == name]
    os.kill(pid, signal.SIGKILL)


def reconciliation(fabric: RunningFabric) -> dict[str, Any]:
    done = run_kvloom("usage", "reconcile", "--json", env=fabric.env)
    return json.loads(done.stdout) if done.stdout.startswith("{") else {"error": done.stderr}


@pytest.mark.timeout(300)
async def test_nothing_is_metered_twice_or_lost_whatever_is_killed(fabric: RunningFabric) -> None:
    """kill -9 of routers, of the control service and of Redis under load: the difference to what the edge counted as
    delivered is 0, and each of them is back without anybody's help."""
    key = kvloom(fabric, "keys", "create", "--project", "acme/search", "--create").strip().splitlines()[-1]
    kvloom(fabric, "prices", "set", "*", "--prompt", "1", "--output", "3")
    load = Load(fabric, key)
    running = asyncio.create_task(load.run())
    await asyncio.sleep(PAUSE_SECONDS)
    assert load.num_complete, "the load does not work"
    for name in KILLED:
        await asyncio.to_thread(kill, fabric, name)
        await asyncio.sleep(PAUSE_SECONDS)
    load.stop.set()
    await running
    found: dict[str, Any] = {}

    def is_settled() -> bool:
        found.clear()
        found.update(reconciliation(fabric))
        return not found.get("error") and not (found["num_over"] or found["num_under"])

    try:
        await asyncio.to_thread(eventually, "everything is metered once", is_settled, 90.0)
    except AssertionError as error:
        raise AssertionError(f"{error}: {found}") from error
    assert found["num_exact"] >= load.num_complete > 50
    assert found["num_witnessed_tokens"] > 1000
    await asyncio.to_thread(check_what_callers_see, fabric, key)


def check_what_callers_see(fabric: RunningFabric, key: str) -> None:
    """The same sums, by the API, by the command, and in the headers of an answer."""
    shown = json.loads(kvloom(fabric, "usage", "show", "--by", "tenant", "--json"))
    [row] = [row for row in shown if row["tenant"] == "acme/search"]

    async def ask() -> tuple[dict[str, Any], str, str]:
        headers = {"authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.get(fabric.http_url + "/v1/usage?by=model") as response:
                usage = await response.json()
            async with http.get(fabric.http_url + "/v1/usage?by=day,model&format=csv") as response:
                as_csv = await response.text()
            body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "one more"}]}
            async with http.post(fabric.http_url + "/v1/chat/completions", json=body) as response:
                tokens = (await response.json())["usage"]
                cost = response.headers["x-kvloom-cost"]
        cached = tokens["prompt_tokens_details"]["cached_tokens"]
        assert cached < tokens["prompt_tokens"]
        expected = (tokens["prompt_tokens"] + 3 * tokens["completion_tokens"]) * 1000
        assert round(float(cost) * 1e9) == expected
        return usage, as_csv, cost

    usage, as_csv, _ = asyncio.run(ask())
    assert usage["tenant"] == "acme/search"
    assert usage["data"][0]["num_output_tokens"] == row["num_output_tokens"]
    assert usage["data"][0]["cost"] == row["cost"]
    assert as_csv.splitlines()[0].startswith("day,model,num_requests")
    assert time.strftime("%Y-", time.gmtime()) in as_csv
