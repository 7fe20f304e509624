"""Rollouts under load, forth and back: no stream breaks, and every answer is whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from tests.e2e.fabric import RunningFabric, eventually, run_kvloom

pytestmark = pytest.mark.xdist_group("models")

NUM_USERS = 10
NUM_TOKENS = 12


@pytest.fixture
def fabric(models_fabric: RunningFabric) -> RunningFabric:
    return models_fabric


def shards_of_chat(fabric: RunningFabric) -> list[str]:
    """The model of each of the versions' shards."""
    return [shard["model"] for shard in fabric.processes("shard") if shard["model"].startswith("chat")]


def standing(fabric: RunningFabric) -> str:
    """The version that stands for the model."""
    (version,) = shards_of_chat(fabric)
    return version


class Users:
    """Each begins a new session with every few requests."""

    def __init__(self, url: str) -> None:
        self.served: Counter[str] = Counter()
        """Whole answers, by the model that gave them."""
        self.answers = asyncio.Semaphore(0)
        """Released with each of them."""
        self._url = url

    async def serve(self, number: int) -> None:
        async with openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0) as client:
            for i in range(10_000):
                chunks = await client.chat.completions.create(
                    model="chat",
                    messages=[{"role": "user", "content": "x"}],
                    max_tokens=NUM_TOKENS,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True, "prompt_cache_key": f"{number}-{i // 3}"},
                )
                model, reason, num_tokens = "", "", 0
                async for chunk in chunks:
                    model = chunk.model
                    reason = chunk.choices[0].finish_reason or reason if chunk.choices else reason
                    num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
                assert (reason, num_tokens) == ("length", NUM_TOKENS)
                self.served[model] += 1
                self.answers.release()

    async def are_served(self, num_answers: int) -> None:
        """Until so many more answers have come."""
        self.answers = asyncio.Semaphore(0)
        for _ in range(num_answers):
            await self.answers.acquire()


@contextlib.asynccontextmanager
async def load_on(fabric: RunningFabric) -> AsyncIterator[Users]:
    """Users who are served as long as the block lasts. Raises what one of them met."""
    users = Users(fabric.http_url)
    tasks = [asyncio.create_task(users.serve(number)) for number in range(NUM_USERS)]
    yield users
    assert not [task for task in tasks if task.done()], await asyncio.gather(*tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def rollout_command(version: str, model_dir: Path, *flags: str) -> list[str]:
    return ["models", "rollout", version, "--path", str(model_dir), "--hold", "1s", *flags]


async def kvloom(fabric: RunningFabric, *args: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(run_kvloom, *args, env=fabric.env)


async def test_a_good_version_replaces_the_old_one(fabric: RunningFabric, model_dir: Path) -> None:
    """The names of the model stand for the version that stayed, and all users got all of their answers."""
    old = standing(fabric)
    async with load_on(fabric) as users:
        done = await kvloom(fabric, *rollout_command("chat@2", model_dir, "--steps", "20,100", "--min-requests", "5"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "step 2 of 2: 100% of the sessions go to chat@2" in done.stdout
        assert "verdict: continue" in done.stdout
        assert users.served[old]
        await users.are_served(NUM_USERS)
    assert users.served["chat@2"]
    assert shards_of_chat(fabric) == ["chat@2"]
    assert outcomes(fabric)[-1] == ("chat@2", "done")


@pytest.mark.long
async def test_a_slow_version_is_taken_back(fabric: RunningFabric, model_dir: Path) -> None:
    """Its first users wait longer for a moment, and nobody loses an answer."""
    old = standing(fabric)
    async with load_on(fabric) as users:
        # It answers about one request a second, and certainty takes some fifteen of them.
        slow = rollout_command("chat@3", model_dir, "--set", "sim.step_ms=400", "--steps", "30,100", "--hold", "3s")
        back = await kvloom(fabric, *slow)
        assert back.returncode != 0
        assert "chat@3 was rolled back: its" in back.stderr, back.stdout + back.stderr
        assert "to first token is certainly above" in back.stderr
        await users.are_served(2 * NUM_USERS)
    assert users.served["chat@3"]
    assert shards_of_chat(fabric) == [old]
    assert outcomes(fabric)[-1] == ("chat@3", "rolled back")


def outcomes(fabric: RunningFabric) -> list[tuple[str, str]]:
    told = json.loads(run_kvloom("models", "history", "chat", "--json", env=fabric.env).stdout)
    return [(event["model"], event["outcome"]) for event in told]


@pytest.mark.long
def test_ctrl_c_takes_a_version_back_and_others_keep_off_it(fabric: RunningFabric, model_dir: Path) -> None:
    """An operator who changes their mind must not wait for a verdict; until then nobody unloads a version under it."""
    old = standing(fabric)
    argv = ["kvloom", *rollout_command("chat@4", model_dir, "--hold", "10m")]
    with subprocess.Popen(argv, env=fabric.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rolling:
        assert rolling.stdout is not None
        while "step 1" not in rolling.stdout.readline():
            pass
        assert fabric.status()["rollouts"][0]["new"] == "chat@4"
        shown = run_kvloom("status", env=fabric.env).stdout
        assert "chat@4: serving, 1%, step 1 of 4" in shown.replace(f" over {old}", "")
        for refused in (("unload", "chat@4"), ("sleep", old), ("rollout", "chat@5", "--path", str(model_dir))):
            assert "is being rolled out" in run_kvloom("models", *refused, env=fabric.env).stderr
        rolling.send_signal(signal.SIGINT)
        _, errors = rolling.communicate(timeout=60)
    assert rolling.returncode != 0
    assert "chat@4 was rolled back: it was asked for" in errors
    eventually("only the old version is left", lambda: shards_of_chat(fabric) == [old])
    assert not fabric.status()["rollouts"]
    failed = run_kvloom(*rollout_command("chat@5", Path("/nowhere")), env=fabric.env)
    assert "no such model: /nowhere" in failed.stderr
    assert "there is no rollout of other" in run_kvloom("models", "rollback", "other", env=fabric.env).stderr
