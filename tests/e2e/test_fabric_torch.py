"""The whole fabric with a real model on the CPU: right answers over every interface."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.conftest import GENERATOR
from tests.e2e.fabric import KVLOOM, RunningFabric, run_kvloom

pytestmark = pytest.mark.xdist_group("torch")

MODEL = GENERATOR
CAPITAL = "What is the capital of France? Answer in one short sentence."


@pytest.fixture
def client(torch_fabric: RunningFabric) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{torch_fabric.http_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def messages(prompt: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": prompt}]


def test_the_official_client_gets_the_capital_of_france(client: openai.OpenAI):
    """The first thing anyone asks: the official client, unchanged, and a right answer."""
    answer = client.chat.completions.create(model=MODEL, messages=messages(CAPITAL), temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_official_client_streams_the_same_answer(client: openai.OpenAI):
    """Streaming changes when the text comes, not what it says."""
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages(CAPITAL), temperature=0, stream=True))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "The capital of France is Paris."
    assert sum(bool(text) for text in texts) >= 5


async def test_the_official_async_client_streams(torch_fabric: RunningFabric):
    """Half of the client's users are asynchronous."""
    async with openai.AsyncOpenAI(base_url=f"{torch_fabric.http_url}/v1", api_key="none", timeout=60) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages("What is 2+2?"), temperature=0, max_tokens=40, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert "4" in text


def test_the_official_client_gets_json_of_its_schema(client: openai.OpenAI):
    """Structured output through every process: n answers, streamed or not, and a compiler's refusal by field."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "capital": {"type": "boolean"}},
        "required": ["city", "capital"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages("Name a city."),
        n=3,
        temperature=1.2,
        seed=1,
        max_tokens=100,
        response_format=wanted,
    )
    for choice in answer.choices:
        content = json.loads(choice.message.content or "")
        assert list(content) == ["city", "capital"]
        assert isinstance(content["capital"], bool)
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=messages("Is Rome in Italy?"),
        stream=True,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) in ("yes", "no")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=messages("x"), extra_body={"structured_outputs": {"regex": "(a"}}
        )
    assert caught.value.param == "structured_outputs.regex"
    assert "regex" in caught.value.message


def test_completions_continue_a_text(client: openai.OpenAI):
    """The older endpoint is still what base models and many tools use."""
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=5, temperature=0)
    assert "Paris" in answer.choices[0].text


def test_a_repeated_prompt_is_served_from_the_kv_cache(client: openai.OpenAI):
    """The router must find the shard where the prompt's blocks lie, and the answer must not change for it."""
    story = "Once there was a weaver who wove a cloth of many colours. " * 12
    answers = [
        client.chat.completions.create(model=MODEL, messages=messages(story), temperature=0, max_tokens=8)
        for _ in range(2)
    ]
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    # The template begins every conversation alike: its first block may be there already.
    assert cached[0] <= 16
    assert cached[1] > 100
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_models_lists_what_is_served(client: openai.OpenAI):
    """Clients ask for the names before they ask for answers."""
    assert MODEL in [model.id for model in client.models.list()]


def test_chat_streams_an_answer_in_the_terminal(torch_fabric: RunningFabric):
    """The SDK's way in: the answer alone on stdout, so that it can be piped; the figures on stderr."""
    done = run_kvloom("chat", CAPITAL, "--temperature", "0", env=torch_fabric.env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
    assert "first token after" in done.stderr
    assert "shard-" in done.stderr


def test_chat_keeps_the_conversation(torch_fabric: RunningFabric):
    """The second question is understood from the first, and its beginning is not computed again."""
    done = run_kvloom(
        "chat", "--temperature", "0", "--max-tokens", "30", env=torch_fabric.env, stdin=f"{CAPITAL}\nSay it again.\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Paris") >= 2
    cached = done.stderr.splitlines()[-1].split(", ")[-1]
    assert int(cached.split()[0]) >= 32


def test_ctrl_c_stops_an_answer(torch_fabric: RunningFabric):
    """A long answer must be stoppable without a stack trace, and the engine must hear of it."""
    args = [str(KVLOOM), "chat", "Count to a thousand, slowly.", "--temperature", "0", "--max-tokens", "1500"]
    pipe = subprocess.PIPE
    with subprocess.Popen(args, env=torch_fabric.env, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.startswith(b"[stopped, first token after ")
    assert errors.count(b"\n") == 1


def test_chat_says_what_is_wrong(torch_fabric: RunningFabric):
    """An unknown model is named in one line."""
    done = run_kvloom("chat", "Hi", "--model", "nobody", env=torch_fabric.env)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "nobody" in done.stderr


def test_a_generic_grpc_tool_can_generate_through_reflection(torch_fabric: RunningFabric):
    """Any language can call the router with nothing but its address: the server describes itself."""
    grpcurl = KVLOOM.with_name("grpcurl")
    address = torch_fabric.router_address
    listed = subprocess.run(
        [grpcurl, "-plaintext", address, "list"], capture_output=True, text=True, timeout=30, check=True
    )
    assert "kvloom.v1.RouterService" in listed.stdout
    assert "grpc.health.v1.Health" in listed.stdout
    request = {
        "model": MODEL,
        "conversation": {"messages": [{"role": "user", "content": CAPITAL}]},
        "sampling": {"temperature": 0},
    }
    call = [grpcurl, "-plaintext", "-d", json.dumps(request), address, "kvloom.v1.RouterService/Generate"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=True)
    decoder, rest, text = json.JSONDecoder(), done.stdout.strip(), ""
    while rest:
        message, end = decoder.raw_decode(rest)
        text += "".join(delta.get("text", "") for delta in message["deltas"])
        rest = rest[end:].lstrip()
    assert text == "The capital of France is Paris."


def test_a_sleeping_model_gives_its_memory_back_and_answers_with_the_same_bits(
    client: openai.OpenAI, torch_fabric: RunningFabric
):
    """Weights and KV cache are the point of sleeping; also the first engine of a process must go."""

    def resident_bytes() -> list[int]:
        shards = [shard for shard in torch_fabric.processes("shard") if shard["model"] == MODEL]
        return [psutil.Process(shard["pid"]).memory_info().rss for shard in shards]

    def answer() -> object:
        sampled = {"max_tokens": 16, "temperature": 0.9, "seed": 3, "logprobs": True, "top_logprobs": 2}
        return client.chat.completions.create(model=MODEL, messages=messages(CAPITAL), **sampled).choices

    answered, before = answer(), resident_bytes()
    done = run_kvloom("models", "sleep", MODEL, env=torch_fabric.env)
    assert done.returncode == 0, done.stderr
    asleep = resident_bytes()
    # 97 MB of packed weights, and what was used of the KV cache.
    assert all(one - other > 1e8 for one, other in zip(before, asleep, strict=True)), (before, asleep)
    done = run_kvloom("models", "wake", MODEL, env=torch_fabric.env)
    assert done.returncode == 0, done.stderr
    assert answer() == answered


@pytest.mark.long
def test_a_gguf_file_is_converted_and_served(tmp_path: Path, torch_fabric: RunningFabric):
    """Models come as GGUF files: a path to one is enough, and clients call it by the file's name."""
    from shard_server.engines.torch_engine.checkpoint.converted_model import find_builtin_gguf

    gguf = tmp_path / "My-Model.gguf"
    gguf.symlink_to(find_builtin_gguf())
    fabric = RunningFabric.start(
        tmp_path / "data",
        "--model",
        str(gguf),
        "--shards",
        "1",
        "--engine",
        "sim",
        KVLOOM_MODEL_CACHE_DIR=str(tmp_path),
    )
    try:
        done = run_kvloom("chat", "Hi", "--model", "my-model", "--max-tokens", "3", env=fabric.env)
        assert done.returncode == 0, done.stderr
        assert not [*tmp_path.rglob("*.safetensors")], "the sim engine reads no weights"
    finally:
        fabric.stop()
