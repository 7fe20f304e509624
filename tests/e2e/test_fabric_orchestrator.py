"""What an orchestrator has acknowledged outlives kill -9 of it and of what it uses, in a whole fabric."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.fabric import RunningFabric, eventually, run_kvloom

pytestmark = pytest.mark.long  # a fabric of its own, and five deaths

MODEL = "smollm2-135m-instruct"
TENANT = "weavers/batches"
NUM_LINES = 60
KILLED = ("orchestrator", "edge-0", "orchestrator", "router-0", "orchestrator")


def kvloom(fabric: RunningFabric, *args: str) -> str:
    done = run_kvloom(*args, env=fabric.env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def num_metered(fabric: RunningFabric, tier: str = "batch") -> int:
    """The requests of the tenant that were metered."""
    rows: list[dict[str, Any]] = json.loads(
        kvloom(fabric, "usage", "show", "--tenant", TENANT, "--by", "tier", "--json")
    )
    return sum(row["num_requests"] for row in rows if row["tier"] == tier)


@pytest.fixture
def fabric(model_dir: Path, tmp_path: Path) -> Iterator[RunningFabric]:
    (tmp_path / "kvloom.toml").write_text("[control]\nenabled = true\n[orchestrator]\nenabled = true\n")
    sim = ("--engine", "sim", "--sim-step-ms", "10", "--edges", "2", "--routers", "2")
    started = RunningFabric.start(tmp_path / "data", *sim, "--config", str(tmp_path / "kvloom.toml"))
    yield started
    started.stop()


def test_a_batch_survives_the_death_of_everything(fabric: RunningFabric) -> None:
    """No line is lost, none is twice, and the counts add up. A stored response and a file are still there."""
    key = kvloom(fabric, "keys", "create", "--project", TENANT, "--create").strip()
    fabric.until_key_is_known(key)
    with openai.OpenAI(base_url=f"{fabric.http_url}/v1", api_key=key, max_retries=10, timeout=60.0) as client:
        survives(fabric, client)


def survives(fabric: RunningFabric, client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Hello.", max_output_tokens=4)
    lines = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"Question {number}?"}],
                "max_tokens": 24,
                "temperature": 0,
            },
        }
        for number in range(NUM_LINES)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", text), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
    )
    for number, name in enumerate(KILLED):
        wanted = (number + 1) * NUM_LINES // (len(KILLED) + 2)
        eventually("some lines have ended", lambda wanted=wanted: num_ended(client, batch.id) >= wanted, 60.0)
        os.kill(next(one["pid"] for one in fabric.processes() if one["name"] == name), signal.SIGKILL)
    eventually("the batch is over", lambda: client.batches.retrieve(batch.id).status == "completed", 90.0)
    ended = client.batches.retrieve(batch.id)
    assert ended.request_counts is not None
    assert (ended.request_counts.total, ended.request_counts.completed) == (NUM_LINES, NUM_LINES)
    assert ended.error_file_id is None
    assert ended.output_file_id is not None
    output = [json.loads(line) for line in client.files.content(ended.output_file_id).text.splitlines()]
    assert [one["custom_id"] for one in output] == [line["custom_id"] for line in lines]
    assert len({one["response"]["body"]["id"] for one in output}) == NUM_LINES
    assert client.files.content(file.id).content == text
    assert client.responses.retrieve(response.id).output_text == response.output_text
    eventually("the fabric is whole", fabric.is_whole)
    eventually("all lines are metered", lambda: num_metered(fabric) >= NUM_LINES)


def num_ended(client: openai.OpenAI, batch_id: str) -> int:
    try:
        counts = client.batches.retrieve(batch_id).request_counts
    except openai.APIStatusError:  # the orchestrator is not back yet
        return -1
    assert counts is not None
    return counts.completed


NUM_RESPONSES = 12
NUM_KILLS = 6
LAST = ("response.completed", "response.incomplete")


@pytest.mark.timeout(500)  # dead processes take long to come back on a busy machine
def test_background_responses_survive_kills_at_random_points(fabric: RunningFabric) -> None:
    """No event is another one, none is lost or twice, a replay is the same from any event on, and each response is
    metered once, whatever dies meanwhile: the orchestrator, an edge or a router."""
    key = kvloom(fabric, "keys", "create", "--project", TENANT, "--create").strip()
    fabric.until_key_is_known(key)
    draw = random.Random(5)
    with openai.OpenAI(base_url=f"{fabric.http_url}/v1", api_key=key, max_retries=10, timeout=60.0) as client:
        made = [
            client.responses.create(model=MODEL, input=f"Story {number}.", max_output_tokens=200, background=True)
            for number in range(NUM_RESPONSES)
        ]
        read: dict[str, list[dict[str, Any]]] = {one.id: [] for one in made}
        readers = [threading.Thread(target=read_through, args=(client, one.id, read[one.id])) for one in made]
        for reader in readers:
            reader.start()
        for number in range(NUM_KILLS):
            wanted = (number + 1) * 12 * NUM_RESPONSES
            eventually("more was read", lambda wanted=wanted: sum(map(len, read.values())) >= wanted, 90.0)
            victim = draw.choice(("orchestrator", "orchestrator", "edge-0", "edge-1", "router-0"))
            for one in fabric.processes():
                if one["name"] == victim and one["pid"]:
                    os.kill(one["pid"], signal.SIGKILL)
        for reader in readers:
            reader.join(120.0)
        eventually("the fabric is whole", fabric.is_whole, 60.0)
        for one in made:
            events = read[one.id]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert [event["type"] for event in events].count("response.created") == 1
            assert events[-1]["type"] in LAST
            ended = client.responses.retrieve(one.id)
            deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
            assert "".join(deltas) == ended.output_text
            for after in range(0, len(events), 10):
                again = client.responses.retrieve(one.id, stream=True, starting_after=after)
                assert [event.to_dict() for event in again] == events[after + 1 :]
        eventually("each is metered once", lambda: num_metered(fabric, "interactive") == NUM_RESPONSES)


def read_through(client: openai.OpenAI, response_id: str, found: list[dict[str, Any]]) -> None:
    """Reads all events of a response, from where it was, as often as the connection is lost."""
    while not found or found[-1]["type"] not in (*LAST, "response.failed"):
        more: dict[str, Any] = {"starting_after": found[-1]["sequence_number"]} if found else {}
        try:
            for event in client.responses.retrieve(response_id, stream=True, **more):
                found.append(event.to_dict())  # noqa: PERF401
        except (openai.APIError, OSError, ValueError):
            continue
