"""Metering of a whole fabric, whose processes are killed under load: what was metered is what was delivered."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import random
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from kvloom.v1.generation_pb2 import SamplingParams, StopConditions
from kvloom.v1.router_service_pb2 import GenerateRequest, PartialChoice, TokenIds
from kvloom.v1.router_service_pb2_grpc import RouterServiceStub
from tests.e2e.fabric import RunningFabric, eventually, run_kvloom

MODEL = "smollm2-135m-instruct"
TENANT = "metered/load"
WORK_SECONDS = 60.0
NUM_CLIENTS = 12
NUM_ANSWERS_BETWEEN = 18
"""Between two kills, and before the first: the process is back by then, and works."""
KILLED = ("router-0", "control", "redis", "router-1", "control")

pytestmark = pytest.mark.xdist_group("control")


@pytest.fixture
def fabric(control_fabric: RunningFabric) -> Iterator[RunningFabric]:
    kvloom(control_fabric, "prices", "set", "*", "--prompt", "1", "--output", "3")
    yield control_fabric
    kvloom(control_fabric, "prices", "set", "*", "--prompt", "0", "--output", "0")


def kvloom(fabric: RunningFabric, *args: str) -> str:
    done = run_kvloom(*args, env=fabric.env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Load:
    """Clients that stream and collect answers until `stop` is set."""

    def __init__(self, fabric: RunningFabric, key: str) -> None:
        self._url = fabric.http_url + "/v1/chat/completions"
        self._router_address = fabric.router_address
        self._headers = {"authorization": f"Bearer {key}"}
        self._metadata = tuple(self._headers.items())
        self.num_outside = 0
        """Tokens that the client of the router's own port was sent."""
        self.stop = asyncio.Event()
        self.num_complete = 0
        self.completed = asyncio.Semaphore(0)
        """Released with each complete answer."""

    async def run(self) -> None:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60.0)) as http,
            grpc.aio.insecure_channel(self._router_address) as channel,
        ):
            clients = [self._client(http, number) for number in range(NUM_CLIENTS)]
            await asyncio.gather(*clients, self._outsider(RouterServiceStub(channel)))

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
                    if is_complete:
                        self.num_complete += 1
                        self.completed.release()
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)  # sleep: no busy loop

    async def _outsider(self, stub: RouterServiceStub) -> None:
        """A client of a router's own port, which lies about what its answers have, and uses one id for all."""
        draw = random.Random(7)
        while not self.stop.is_set():
            n = draw.randint(1, 3)
            claims = [
                PartialChoice(index=index, token_ids=[draw.randint(100, 900)] * draw.randint(1, 40))
                for index in range(n)
                if draw.random() < 0.6
            ]
            if len(claims) > 1:
                claims[0].done = True
            wanted = GenerateRequest(
                model=MODEL,
                request_id="mine",
                token_ids=TokenIds(ids=[draw.randint(100, 900)] * draw.randint(1, 60)),
                n=n,
                sampling=SamplingParams(seed=1, temperature=draw.random()),
                stop=StopConditions(max_tokens=60),
                partial_choices=claims,
            )
            try:
                async for response in stub.Generate(wanted, metadata=self._metadata, timeout=60):
                    self.num_outside += sum(len(delta.token_ids) for delta in response.deltas)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                    raise
                await asyncio.sleep(0.1)  # sleep: its router was killed: no busy loop

    async def work(self, num_answers: int) -> None:
        """Until so many more answers are complete."""
        self.completed = asyncio.Semaphore(0)
        async with asyncio.timeout(WORK_SECONDS):
            for _ in range(num_answers):
                await self.completed.acquire()


def kill(fabric: RunningFabric, name: str) -> None:
    """Returns when the process is back."""

    def pid_and_state() -> tuple[int, str]:
        [found] = [(process["pid"], process["state"]) for process in fabric.processes() if process["name"] == name]
        return found

    killed, _ = pid_and_state()
    os.kill(killed, signal.SIGKILL)
    eventually(f"{name} is back", lambda: pid_and_state()[0] != killed and pid_and_state()[1] == "ready", 30.0)


def reconciliation(fabric: RunningFabric) -> dict[str, Any]:
    done = run_kvloom("usage", "reconcile", "--json", env=fabric.env)
    return json.loads(done.stdout) if done.stdout.startswith("{") else {"error": done.stderr}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [KILLED[:2], pytest.param(KILLED, marks=pytest.mark.long)], ids=" ".join)
async def test_nothing_is_metered_twice_or_lost_whatever_is_killed(
    fabric: RunningFabric, killed: tuple[str, ...]
) -> None:
    """kill -9 of routers, of the control service and of Redis under load, with a client of gRPC that lies: the
    difference to what edges and routers counted as delivered is 0, and each is back without anybody's help."""
    key = kvloom(fabric, "keys", "create", "--project", TENANT, "--create").strip().splitlines()[-1]
    await asyncio.to_thread(fabric.until_key_is_known, key)
    load = Load(fabric, key)
    running = asyncio.create_task(load.run())
    await load.work(NUM_ANSWERS_BETWEEN)
    for name in killed:
        await asyncio.to_thread(kill, fabric, name)
        await load.work(NUM_ANSWERS_BETWEEN)
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
    assert load.num_outside > 200
    await asyncio.to_thread(check_that_all_have_one_number, fabric, key, asks_prometheus=killed is KILLED)
    await asyncio.to_thread(check_what_callers_see, fabric, key)


def check_that_all_have_one_number(fabric: RunningFabric, key: str, *, asks_prometheus: bool) -> None:
    """The tenant's spend as the tenant, the administrator's page, the CSV, the command and Prometheus have it: a user
    who is shown two numbers believes neither. Prometheus has it after half a minute."""
    admin = kvloom(
        fabric, "keys", "create", "--project", "metered/staff", "--create", "--scope", "admin", "--scope", "inference"
    )

    def get(path: str, secret: str) -> str:
        headers = {"authorization": f"Bearer {secret.strip().splitlines()[-1]}"}
        with urllib.request.urlopen(urllib.request.Request(fabric.http_url + path, headers=headers), timeout=10) as one:
            return one.read().decode()

    fabric.until_key_is_known(admin.strip().splitlines()[-1])
    [shown] = [row for row in json.loads(kvloom(fabric, "usage", "show", "--by", "tenant", "--json"))
               if row["tenant"] == TENANT]  # fmt: skip
    spend = Decimal(shown["cost"])
    assert spend > 0
    of_api = json.loads(get("/v1/usage?by=model", key))["data"]
    assert sum(Decimal(row["cost"]) for row in of_api) == spend
    of_page = json.loads(get("/admin/v1/usage?by=tenant", admin))["data"]
    assert [Decimal(row["cost"]) for row in of_page if row["tenant"] == TENANT] == [spend]
    for path, secret in (("/v1/usage?by=day&format=csv", key), ("/admin/v1/usage?by=tenant,day&format=csv", admin)):
        rows = list(csv.DictReader(io.StringIO(get(path, secret))))
        assert sum(Decimal(row["cost"]) for row in rows if row.get("tenant", TENANT) == TENANT) == spend
    [control] = fabric.processes("control")

    def of_prometheus() -> Decimal | None:
        with urllib.request.urlopen(f"http://{control['metrics_address']}/metrics", timeout=10) as page:
            found = re.search(
                rf'^kvloom_control_usage_cost{{.*tenant="{TENANT}".*}} (\S+)$', page.read().decode(), re.M
            )
        return round(Decimal(found[1]), 9) if found else None

    if asks_prometheus:
        eventually("Prometheus has the same spend", lambda: of_prometheus() == spend, 60.0)


def check_what_callers_see(fabric: RunningFabric, key: str) -> None:
    """The same sums, by the API, by the command, and in the headers of an answer."""
    assert any(Path(fabric.env["KVLOOM_DATA_DIR"]).glob("witness/router-*.jsonl"))
    shown = json.loads(kvloom(fabric, "usage", "show", "--by", "tenant", "--json"))
    [row] = [row for row in shown if row["tenant"] == TENANT]

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
    assert usage["tenant"] == TENANT
    assert usage["data"][0]["num_output_tokens"] == row["num_output_tokens"]
    assert usage["data"][0]["cost"] == row["cost"]
    assert as_csv.splitlines()[0].startswith("day,model,num_requests")
    assert time.strftime("%Y-", time.gmtime()) in as_csv
