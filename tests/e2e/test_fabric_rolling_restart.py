"""A rolling restart under load: every process is replaced, and no client notices."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest

from tests.e2e.fabric import RunningFabric, run_kvloom

QUESTIONS = [(f"Question {number}: what is new?", 30 + 20 * number) for number in range(6)]
"""With the number of tokens of their answers: 0.3 to 1.3 s at 10 ms a token, as on the shared fabric."""
NUM_CLIENTS = 6
TIMEOUT_SECONDS = 90.0


@dataclasses.dataclass
class Load:
    """Clients that ask and ask again, and compare every answer with the one that an undisturbed fabric gave."""

    url: str
    model: str
    key: str
    expected: list[str] = dataclasses.field(default_factory=list)
    num_answered: int = 0
    answered: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    faults: Counter[str] = dataclasses.field(default_factory=Counter)

    async def learn(self) -> None:
        async with self._session() as session:
            answers = (self.ask_plainly(session, number) for number in range(len(QUESTIONS)))
            self.expected = await asyncio.gather(*answers)
        assert len(set(self.expected)) == len(QUESTIONS)

    async def ask_plainly(self, session: aiohttp.ClientSession, number: int) -> str:
        """By a client that never tries again."""
        question, num_tokens = QUESTIONS[number]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": num_tokens,
            "seed": 7,
            "stream": True,
        }
        text = ""
        async with session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, f"status {response.status}: {await response.text()}"
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    assert "error" not in event, event["error"]["message"]
                    text += event["choices"][0]["delta"].get("content") or ""
        return text

    async def ask_openai(self, client: openai.AsyncOpenAI, number: int) -> str:
        question, num_tokens = QUESTIONS[number]
        stream = await client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=num_tokens,
            seed=7,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run_client(self, seat: int, stop: asyncio.Event) -> None:
        number = seat
        async with self._session() as session, self._openai() as client:
            while not stop.is_set():
                number = (number + 1) % len(QUESTIONS)
                try:
                    ask = self.ask_plainly(session, number) if seat % 2 else self.ask_openai(client, number)
                    answer = await ask
                except (aiohttp.ClientError, openai.OpenAIError, AssertionError) as error:
                    self.faults[f"{type(error).__name__}: {error}"[:120]] += 1
                else:
                    self.faults["another answer"] += answer != self.expected[number]
                self.num_answered += 1
                self.answered.set()

    def _openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0)

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.key}"})


@pytest.fixture
async def load(fabric: RunningFabric) -> AsyncIterator[Load]:
    """Runs while the test does."""
    made = run_kvloom("keys", "create", "--project", "rolling/app", "--create", env=fabric.env)
    assert made.returncode == 0, made.stderr
    load = Load(fabric.http_url, fabric.status()["model"], made.stdout.strip())
    await asyncio.to_thread(fabric.until_key_is_known, load.key)
    await load.learn()
    stop = asyncio.Event()
    clients = [asyncio.create_task(load.run_client(seat, stop)) for seat in range(NUM_CLIENTS)]
    yield load
    stop.set()
    await asyncio.wait_for(asyncio.gather(*clients), TIMEOUT_SECONDS)


@pytest.fixture(
    params=[
        pytest.param("control", marks=pytest.mark.xdist_group("control")),
        pytest.param("colocated", marks=[pytest.mark.xdist_group("colocated"), pytest.mark.long]),
    ]
)
def fabric(request: pytest.FixtureRequest) -> RunningFabric:
    return request.getfixturevalue(f"{request.param}_fabric")


@pytest.mark.parametrize(
    "named", [["router-0", "edge-0", "shard-0"], pytest.param(["--rolling"], marks=pytest.mark.long)], ids=" ".join
)
async def test_a_rolling_restart_loses_nothing(fabric: RunningFabric, load: Load, named: list[str]):
    """An upgrade must be no event for users: each answer is complete and the same, without any client trying again. A
    process of each kind, or all of them."""
    before = {process["name"]: process["pid"] for process in fabric.processes()}
    named = [name for name in named if name in before or name == "--rolling"]  # colocated routers are in the edges
    done = await asyncio.to_thread(run_kvloom, "restart", *named, env=fabric.env, timeout_seconds=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    after = {process["name"]: process["pid"] for process in fabric.processes()}
    assert after.keys() == before.keys()
    replaced = {name for name in before if before[name] != after[name]}
    assert replaced == (before.keys() - {"redis"} if named == ["--rolling"] else set(named))
    answered_before = load.num_answered
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while load.num_answered < answered_before + NUM_CLIENTS:  # by the new processes
            load.answered.clear()
            await load.answered.wait()
    assert +load.faults == Counter()
    assert load.num_answered > 3 * NUM_CLIENTS


@pytest.mark.xdist_group("models")
async def test_the_only_shard_of_a_model_is_restarted_without_losing_a_request(models_fabric: RunningFabric) -> None:
    """With one shard a restart was 8.6 s of 503, though the command's promise names no number of shards."""
    fabric = models_fabric
    (shard,) = (process["name"] for process in fabric.processes("shard") if process["model"] == "chat")
    load = Load(fabric.http_url, "chat", "unused")
    await load.learn()
    stop = asyncio.Event()
    clients = [asyncio.create_task(load.run_client(seat, stop)) for seat in range(2)]
    done = await asyncio.to_thread(run_kvloom, "restart", shard, env=fabric.env, timeout_seconds=TIMEOUT_SECONDS)
    stop.set()
    await asyncio.wait_for(asyncio.gather(*clients), TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{shard} is the only shard of its model: {shard}-spare serves meanwhile" in done.stdout
    assert +load.faults == Counter()
    assert load.num_answered > 2
    assert f"{shard}-spare" not in {process["name"] for process in fabric.processes()}


@pytest.mark.xdist_group("models")
def test_a_drain_of_the_only_shard_of_a_model_warns(models_fabric: RunningFabric) -> None:
    """Its requests are refused until somebody takes the drain back."""
    (shard,) = (process["name"] for process in models_fabric.processes("shard") if process["model"] == "chat")
    drained = run_kvloom("drain", shard, env=models_fabric.env)
    undrained = run_kvloom("undrain", shard, env=models_fabric.env)
    assert (drained.returncode, undrained.returncode) == (0, 0)
    assert drained.stderr.startswith(f"warning: {shard} is the only shard of chat that takes requests")
