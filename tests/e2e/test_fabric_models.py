"""Several models in one fabric, on machines that have their files and on machines that have none."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from kvloom import KvloomError, SyncClient
from tests.e2e.conftest import GENERATOR
from tests.e2e.fabric import RunningFabric, eventually, kvloom_environment, run_kvloom
from tests.fakes.redis_server import redis_server

pytestmark = pytest.mark.xdist_group("models")

BUILTIN = GENERATOR
SIM = ("--engine", "sim", "--sim-step-ms", "2")
NUM_PROMPT_TOKENS_OF_TINY = 3
"""Of MESSAGES: "the", " ", "quick brown fox"."""
NUM_LONG_TOKENS = 1500
"""More than a command takes to start."""
MESSAGES: Any = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture
def fabric(models_fabric: RunningFabric) -> RunningFabric:
    return models_fabric


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_each_model_has_its_own_tokenizer_template_window_and_shards(fabric: RunningFabric) -> None:
    """Clients choose by name, and nothing of one model may be used for the other."""
    with client(fabric.http_url) as openai_client:
        models = {model.id: model.to_dict() for model in openai_client.models.list() if model.id in (BUILTIN, "tiny")}
        assert {name: model["max_model_len"] for name, model in models.items()} == {BUILTIN: 8192, "tiny": 512}
        assert {name: model["num_ready_shards"] for name, model in models.items()} == {BUILTIN: 2, "tiny": 1}
        usages = {}
        for name in models:
            answer = openai_client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=7)
            assert (answer.model, answer.usage and answer.usage.completion_tokens) == (name, 7)
            usages[name] = answer.usage and answer.usage.prompt_tokens
        assert usages["tiny"] == NUM_PROMPT_TOKENS_OF_TINY != usages[BUILTIN]
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
            openai_client.completions.create(model="tiny", prompt="fox " * 600, max_tokens=1)
        with pytest.raises(openai.NotFoundError):
            openai_client.chat.completions.create(model="huge", messages=MESSAGES)


def test_routes_choose_for_http_sdk_and_explain(fabric: RunningFabric) -> None:
    """All of them pass the same rules, and each says which model it was."""
    url = fabric.http_url
    with client(url) as openai_client:
        create = openai_client.chat.completions.with_raw_response.create
        short = create(model="cheapest", messages=MESSAGES, max_tokens=3)
        assert short.headers["x-kvloom-route"] == "cheapest;target=tiny"
        long = create(model="cheapest", messages=[{"role": "user", "content": "fox " * 600}], max_tokens=3)
        assert (long.headers["x-kvloom-model"], long.parse().model) == (BUILTIN, BUILTIN)
        assert long.headers["x-kvloom-route"].endswith("passed=tiny:context_length_exceeded")
        listed = create(model="gone", messages=MESSAGES, max_tokens=3, extra_body={"models": ["tiny"]})
        assert listed.headers["x-kvloom-model"] == "tiny"
    explained = run_kvloom("explain", "--prompt", "hello", "--model", "cheapest", env=fabric.env)
    assert "model tiny, chosen by cheapest;target=tiny" in explained.stdout
    with SyncClient(fabric.router_address) as sdk:
        given: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        assert sdk.complete(model="gone", models=["cheapest"], **given).choices[0].finish_reason.name == "LENGTH"
        with pytest.raises(KvloomError, match="'gone' does not exist"):
            sdk.complete(model="gone", models=["lost"], **given)


@pytest.mark.long
def test_a_machine_without_files_serves_from_cards(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Edges and routers scale on machines without a disk that all share; they learn of models, aliases and defaults
    from the shards. (A machine of test_fabric_fleet.py has no files in every run.)"""
    folder = tmp_path_factory.mktemp("fleet")
    secret = folder / "fabric.secret"
    secret.touch(mode=0o600)
    secret.write_text(run_kvloom("secret", "new", env=dict(os.environ)).stdout)
    config = folder / "shards.toml"
    config.write_text(
        f'[[models]]\nname = "tiny"\npath = "{tiny_dir}"\naliases = ["small"]\nversion = "7"\n'
        "defaults = { max_tokens = 5 }\nshard = { num_shards = 1 }\n"
    )
    with redis_server() as redis:
        shared = ("--join", redis.connection_url, *SIM)
        settings = {"KVLOOM_SECRET_FILE": str(secret)}
        flags = ("--config", str(config), "--role", "shard", "--role", "safety", "--name-prefix", "a-")
        shards = kvloom_environment(folder / "a", **settings)
        done = run_kvloom("up", "--detach", *shared, *flags, env=shards)
        assert done.returncode == 0, done.stdout + done.stderr
        without_files = {**settings, "KVLOOM_MODEL_CACHE_DIR": str(folder / "no-models")}
        flags = ("--role", "router", "--role", "edge", "--name-prefix", "b-")
        edge = RunningFabric.start(folder / "b", *shared, *flags, **without_files)
        try:
            with client(edge.http_url) as openai_client:
                eventually("both names", lambda: len(list(openai_client.models.list())) == 2)
                found = openai_client.models.retrieve("small").to_dict()
                assert (found["root"], found["version"]) == ("tiny", "7")
                answer = openai_client.chat.completions.create(model="small", messages=MESSAGES)
                assert answer.model == "tiny"
                assert answer.usage is not None
                assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (NUM_PROMPT_TOKENS_OF_TINY, 5)
            assert not (folder / "no-models").exists()
        finally:
            edge.stop()
            assert run_kvloom("down", env=shards).returncode == 0


async def stream(url: str, model: str, num_tokens: int, begun: asyncio.Semaphore | None = None) -> tuple[str, int]:
    """The finish reason and the number of tokens of a streamed answer. `begun` is released once with the first."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as async_client:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"ignore_eos": True}}
        chunks = await async_client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=num_tokens, **options
        )
        reason, completion_tokens = "", 0
        async for chunk in chunks:
            if begun is not None:
                begun.release()
                begun = None
            reason = chunk.choices[0].finish_reason or reason if chunk.choices else reason
            completion_tokens = chunk.usage.completion_tokens if chunk.usage else completion_tokens
    return reason, completion_tokens


async def test_models_come_and_go_without_a_broken_stream(fabric: RunningFabric, tiny_dir: Path) -> None:
    """Models are changed while users are served: those of other models notice nothing, and answers of the model that
    goes are finished."""

    def kvloom(*args: str) -> subprocess.CompletedProcess[str]:
        return run_kvloom("models", *args, env=fabric.env)

    others = [asyncio.create_task(stream(fabric.http_url, BUILTIN, 1500)) for _ in range(4)]
    done = await asyncio.to_thread(kvloom, "load", f"second={tiny_dir}", "--shards", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert await stream(fabric.http_url, "second", 5) == ("length", 5)
    assert [shard["name"] for shard in fabric.processes("shard") if shard["model"] == "second"] == ["shard-second-0"]

    begun = asyncio.Semaphore(0)
    last = [asyncio.create_task(stream(fabric.http_url, "second", 400, begun)) for _ in range(8)]
    for _ in last:
        await begun.acquire()
    unloading = asyncio.create_task(asyncio.to_thread(kvloom, "unload", "second"))
    refused = 0
    while not unloading.done():
        try:
            await stream(fabric.http_url, "second", 1)
        except openai.NotFoundError:
            refused += 1
    done = await unloading
    assert done.returncode == 0, done.stdout + done.stderr
    assert refused
    assert await asyncio.gather(*last) == [("length", 400)] * len(last)
    assert await asyncio.gather(*others) == [("length", 1500)] * len(others)
    with client(fabric.http_url) as openai_client:
        names = lambda: {model.id for model in openai_client.models.list()}  # noqa: E731
        eventually("the edge forgets the model", lambda: "second" not in names())


async def test_a_shard_is_scaled_in_without_a_broken_stream(fabric: RunningFabric, model_dir: Path) -> None:
    """`kvloom scale-in` ends a process for good: what it has not answered in time moves, no restart brings it back, and
    the model that has lost it can be used and unloaded."""

    def kvloom(*args: str) -> subprocess.CompletedProcess[str]:
        return run_kvloom(*args, env=fabric.env)

    def num_running() -> dict[str, int]:
        """By shard of the model."""
        shards = zip(fabric.processes("shard"), fabric.shard_loads(), strict=True)
        return {shard["name"]: load.num_running for shard, load in shards if shard["model"] == "scaled"}

    done = await asyncio.to_thread(kvloom, "models", "load", f"scaled={model_dir}", "--shards", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    begun = asyncio.Semaphore(0)
    streams = [asyncio.create_task(stream(fabric.http_url, "scaled", NUM_LONG_TOKENS, begun)) for _ in range(2)]
    for _ in streams:
        await begun.acquire()
    running = num_running()
    leaving = max(running, key=lambda name: running[name])
    (staying,) = running.keys() - {leaving}
    done = await asyncio.to_thread(kvloom, "scale-in", leaving, "--within", "1s")
    assert (done.returncode, done.stdout) == (0, f"{leaving} has ended\n"), done.stderr
    assert not done.stderr.startswith(f"{leaving}: 0 running")
    assert list(num_running()) == [staying]
    assert leaving not in kvloom("status").stdout
    assert await asyncio.gather(*streams) == [("length", NUM_LONG_TOKENS)] * len(streams)
    assert await stream(fabric.http_url, "scaled", 5) == ("length", 5)
    assert "there is no shard" in kvloom("scale-in", leaving).stderr
    done = await asyncio.to_thread(kvloom, "models", "unload", "scaled")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not num_running()


def test_a_load_that_fails_leaves_everything_as_it_was(fabric: RunningFabric, tmp_path: Path) -> None:
    """The reason must be said, and neither the configuration nor the processes may remember the model."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    before = fabric.status()
    for source, reason in ((f"bad={tmp_path}", "tokenizer.json"), (f"tiny={tmp_path}", "name or alias 'tiny'")):
        done = run_kvloom("models", "load", source, env=fabric.env)
        assert done.returncode != 0
        assert reason in done.stdout + done.stderr
    after = fabric.status()
    assert [process["name"] for process in after["processes"]] == [process["name"] for process in before["processes"]]
    assert (after["phase"], after["model"]) == ("ready", before["model"])
    assert run_kvloom("models", "unload", "bad", env=fabric.env).returncode != 0
    with client(fabric.http_url) as openai_client:
        assert openai_client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1).usage


def kill_shard_of(fabric: RunningFabric, model: str) -> None:
    """Kill one, and return when it serves again."""
    victim = next(shard for shard in fabric.processes("shard") if shard["model"] == model)
    os.kill(victim["pid"], signal.SIGKILL)

    def is_back() -> bool:
        now = next(shard for shard in fabric.processes("shard") if shard["name"] == victim["name"])
        return now["state"] == "ready" and now["pid"] != victim["pid"]

    eventually("the shard is back", is_back)


def test_adapters_come_and_go_by_command_and_by_call(fabric: RunningFabric, tmp_path: Path) -> None:
    """All shards of the model get them, also one that is restarted later, and clients use them by either name."""

    def kvloom(*args: str) -> str:
        done = run_kvloom("models", *args, env=fabric.env)
        return f"{done.returncode}\n{done.stdout}{done.stderr}"

    def listed(name: str) -> str:
        lines = map(str.strip, kvloom("list").splitlines())
        return next((line for line in lines if line.startswith(f"{BUILTIN}:{name} ")), "")

    assert kvloom("load-adapter", BUILTIN, "law", str(tmp_path)).startswith("0")
    assert "there is an adapter" in kvloom("load-adapter", BUILTIN, "law", str(tmp_path))
    assert kvloom("load-adapter", "huge", "law", str(tmp_path)).startswith("1")
    assert kvloom("load-adapter", BUILTIN, "no name", str(tmp_path)).startswith("1")
    assert "on 2 shards, loaded on shard-" in listed("law"), "one has proven it"
    with client(fabric.http_url) as openai_client:
        create = openai_client.chat.completions.create
        given: Any = {"messages": MESSAGES, "max_tokens": 7, "seed": 1}
        eventually("the edge knows it", lambda: "law" in {model.id for model in openai_client.models.list()})
        assert openai_client.models.retrieve("law").to_dict()["parent"] == BUILTIN
        texts = {name: create(model=name, **given).choices[0].message.content for name in ("law", BUILTIN)}
        assert texts["law"] != texts[BUILTIN]
        assert create(model=f"{BUILTIN}:law", **given).choices[0].message.content == texts["law"]
        assert "loaded on shard-" in listed("law")
        kill_shard_of(fabric, BUILTIN)
        eventually("both shards have it", lambda: "on 2 shards" in listed("law"))
        body = {"lora_name": "poetry", "lora_path": "poetry", "base_model_name": BUILTIN}
        assert openai_client.post("/load_lora_adapter", cast_to=str, body=body).startswith("Success")
        assert create(model="poetry", **given).choices[0].message.content not in texts.values()
        assert openai_client.post("/unload_lora_adapter", cast_to=str, body={"lora_name": "poetry"}).startswith(
            "Success"
        )
        assert kvloom("unload-adapter", BUILTIN, "law").startswith("0")
        assert "has none" in kvloom("unload-adapter", BUILTIN, "law")
        eventually("the edge forgets it", lambda: "law" not in {model.id for model in openai_client.models.list()})
        with pytest.raises(openai.NotFoundError, match="has no adapter 'law'"):
            create(model=f"{BUILTIN}:law", **given)
