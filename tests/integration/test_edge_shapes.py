"""The edge's answers have OpenAI's shapes, byte by byte where it matters, and the official client understands them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from kvloom.v1.generation_pb2 import TokenLogprobs
from tests.fakes.edge_world import EdgeWorld, chat_body, edge_world
from tests.fakes.fake_router_link import LENGTH, FakeRequest, answer
from tests.fakes.tiny_tokenizer import byte_level_tokenizer


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world() as started:
        yield started


def client(world: EdgeWorld) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0)


def ids_of(text: str) -> list[int]:
    return byte_level_tokenizer().encode(text, add_special_tokens=False).ids


async def events_of(world: EdgeWorld, path: str, body: dict[str, Any], **more: Any) -> list[Any]:
    """Returns the data of all events, which have no ids: the client did not ask for a stream that can be resumed."""
    async with world.http.post(world.url + path, json=body, **more) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        raw = (await response.read()).decode()
    events = [re.fullmatch(r"data: (.*)", event) for event in raw.removesuffix("\n\n").split("\n\n")]
    assert all(events)
    data = [event[1] for event in events if event]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]


async def test_chat_body_has_openai_shape(world: EdgeWorld) -> None:
    """A client that is not streaming gets one object with text, finish reason and usage."""
    world.link.script = answer("Hel", "lo", num_cached_tokens=16)
    status, body = await world.chat()
    assert status == 200
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{24}", body["id"])
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["system_fingerprint"] == "fp_test"
    assert isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    num_prompt_tokens = len(world.link.requests[0].request.prompt_token_ids)
    assert body["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": 2,
        "total_tokens": num_prompt_tokens + 2,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert "kvloom" not in body


async def test_chat_stream_has_openai_shape(world: EdgeWorld) -> None:
    """The role comes first, then a chunk per delta, the finish reason, usage without choices, and [DONE]."""
    world.link.script = answer("Hel", "", 'l"o\n🙂', reason=LENGTH)
    body = chat_body(stream=True, stream_options={"include_usage": True})
    chunks = await events_of(world, "/v1/chat/completions", body)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["system_fingerprint"]) for chunk in chunks}) == 1
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "Hel"},
        {"content": 'l"o\n🙂'},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "length"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_stream_without_include_usage_never_mentions_usage(world: EdgeWorld) -> None:
    """Clients that did not ask for usage must not get a chunk without choices."""
    world.link.script = answer("a", "b")
    chunks = await events_of(world, "/v1/chat/completions", chat_body(stream=True))
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


async def test_completion_stream_and_body(world: EdgeWorld) -> None:
    """Plain completions have text_completion objects with `text`, streamed or not."""
    world.link.script = answer(" jumps", " over")
    prompt = {"model": "tiny", "prompt": "the fox"}
    status, body = await world.post("/v1/completions", prompt)
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": " jumps over", "logprobs": None, "finish_reason": "stop"}]
    chunks = await events_of(world, "/v1/completions", prompt | {"stream": True})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [" jumps", " over", ""]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert world.link.requests[0].request.wanted.stop.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("the", [ids_of("the")]),
        ([5, 6, 7], [[5, 6, 7]]),
        (["the", "fox"], [ids_of("the"), ids_of("fox")]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
async def test_completion_takes_all_four_kinds_of_prompt(
    world: EdgeWorld, prompt: Any, token_ids: list[list[int]]
) -> None:
    """A prompt may be a string, ids, a list of strings or a list of lists. Choices are numbered prompt by prompt, and
    usage is the sum."""
    world.link.script = answer("x")
    status, body = await world.post("/v1/completions", {"model": "tiny", "prompt": prompt, "n": 2})
    assert status == 200
    assert [list(request.request.prompt_token_ids) for request in world.link.requests] == token_ids
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(token_ids)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, token_ids))
    assert body["usage"]["completion_tokens"] == 2 * len(token_ids)
    assert len({request.request.wanted.request_id for request in world.link.requests}) == len(token_ids)


async def test_choices_of_a_stream_may_interleave(world: EdgeWorld) -> None:
    """With n > 1 every choice has its own first chunk, deltas and finish, with its index."""

    def play(request: FakeRequest) -> None:
        request.start(1)
        request.tokens("B1", 1)
        request.start(0)
        request.tokens("A1", 0)
        request.tokens("B2", 1)
        request.finish(LENGTH, 1)
        request.tokens("A2", 0)
        request.finish(index=0)

    world.link.script = play
    chunks = await events_of(world, "/v1/chat/completions", chat_body(stream=True, n=2))
    by_index = [[chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index] for index in (0, 1)]
    assert ["".join(choice["delta"].get("content", "") for choice in choices) for choices in by_index] == [
        "A1A2",
        "B1B2",
    ]
    assert [choices[0]["delta"]["role"] for choices in by_index] == ["assistant", "assistant"]
    assert [choices[-1]["finish_reason"] for choices in by_index] == ["stop", "length"]


def with_logprobs(request: FakeRequest) -> None:
    """Sends two tokens, of which the first is half of é, and then the end token."""
    first, second, end = *ids_of("é")[:1], ids_of("the")[0], byte_level_tokenizer().token_to_id("<|im_end|>")
    entries = [
        TokenLogprobs(logprob=-0.5, top_token_ids=[first, second], top_logprobs=[-0.5, -1.5]),
        TokenLogprobs(logprob=float("-inf"), top_token_ids=[end, first], top_logprobs=[0.0, float("-inf")]),
    ]
    request.start()
    request.tokens("é", token_ids=[first], logprobs=entries[:1])
    request.tokens("the", token_ids=[second, end], logprobs=[entries[1], entries[0]])
    request.finish()


async def test_chat_logprobs(world: EdgeWorld) -> None:
    """Every token of the text has its own text, exact bytes and alternatives, and infinities become numbers that JSON
    can represent. The token that ends the answer is no text."""
    world.link.script = with_logprobs
    _, body = await world.chat(logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["é", "the"[: len(content[1]["token"])]]
    assert [entry["logprob"] for entry in content] == [-0.5, -9999.0]
    assert content[0]["bytes"] == list("é".encode())
    assert [top["logprob"] for top in content[1]["top_logprobs"]] == [0.0, -9999.0]
    assert world.link.requests[0].request.wanted.sampling.logprobs == 2
    chunks = await events_of(world, "/v1/chat/completions", chat_body(stream=True, logprobs=True, top_logprobs=2))
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for piece in streamed if piece for entry in piece["content"]] == content


async def test_completion_logprobs(world: EdgeWorld) -> None:
    """Plain completions have parallel lists, with offsets into the text."""
    world.link.script = with_logprobs
    _, body = await world.post("/v1/completions", {"model": "tiny", "prompt": "a", "logprobs": 2})
    logprobs = body["choices"][0]["logprobs"]
    assert {name: len(values) for name, values in logprobs.items()} == {
        "tokens": 3,
        "token_logprobs": 3,
        "top_logprobs": 3,
        "text_offset": 3,
    }
    assert logprobs["text_offset"][:2] == [0, 1]
    assert logprobs["top_logprobs"][0][logprobs["tokens"][0]] == -0.5
    assert world.link.requests[0].request.wanted.sampling.logprobs == 2


async def test_parameters_reach_the_router(world: EdgeWorld) -> None:
    """Options that the client sets reach the router, and others stay unset."""
    world.link.script = answer("x")
    headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    await world.post(
        "/v1/chat/completions",
        chat_body(
            max_completion_tokens=7,
            temperature=0,
            top_p=0.5,
            top_k=3,
            seed=-1,
            stop="END",
            stop_token_ids=[4],
            ignore_eos=True,
            presence_penalty=1,
            frequency_penalty=-1,
            user="u",
            service_tier="auto",
        ),
        headers=headers,
    )
    await world.chat(messages=[{"role": "developer", "content": [{"type": "text", "text": "a"}] * 2}])
    full, bare = (request.request for request in world.link.requests)
    assert (full.wanted.stop.max_tokens, list(full.wanted.stop.stop), list(full.wanted.stop.stop_token_ids)) == (
        7,
        ["END"],
        [4],
    )
    assert full.wanted.stop.ignore_eos
    sampling = full.wanted.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0, 0.5, 3, 2**64 - 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert full.submit.traceparent == headers["traceparent"]
    assert full.submit.prompt_text == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert not bare.wanted.sampling.ListFields()
    assert not bare.wanted.stop.ListFields()
    tokenizer = byte_level_tokenizer()
    prompt = tokenizer.decode(list(bare.prompt_token_ids), skip_special_tokens=False)
    assert prompt == "<|im_start|>system\naa<|im_end|>\n<|im_start|>assistant\n"


async def test_details_come_with_the_last_chunk_when_asked_for(world: EdgeWorld) -> None:
    """The chat page shows which shard answered and how much it had cached; other clients do not get this."""
    world.link.script = answer("x", shard_id="shard-7", num_cached_tokens=32, queue_time_seconds=0.25)
    headers = {"x-kvloom-details": "true"}
    expected = {"shard_id": "shard-7", "num_cached_tokens": 32, "queue_time_seconds": 0.25}
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = await events_of(world, "/v1/chat/completions", chat_body(stream=True, **options), headers=headers)
        assert [chunk.get("kvloom") for chunk in chunks] == [*[None] * (len(chunks) - 1), expected]
    _, body = await world.post("/v1/chat/completions", chat_body(), headers=headers)
    assert body["kvloom"] == expected


async def test_models(world: EdgeWorld) -> None:
    """Clients list models before they send requests, and the chat page shows which are ready."""
    async with client(world) as openai_client:
        models = [model async for model in await openai_client.models.list()]
        assert [model.id for model in models] == ["tiny"]
        assert (await openai_client.models.retrieve("tiny")).owned_by == "kvloom"
        with pytest.raises(openai.NotFoundError) as caught:
            await openai_client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


async def test_openai_client_async(world: EdgeWorld) -> None:
    """The official client reads our streams and bodies."""
    world.link.script = answer("Par", "is")
    async with client(world) as openai_client:
        completion = await openai_client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], n=2, stop=["\n"]
        )
        assert [choice.message.content for choice in completion.choices] == ["Paris", "Paris"]
        assert completion.usage is not None
        assert completion.usage.completion_tokens == 4
        stream = await openai_client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Paris"
        assert chunks[-1].usage is not None
        plain = await openai_client.completions.create(model="tiny", prompt="hi", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in plain]) == "Paris"


async def test_openai_client_sync(world: EdgeWorld) -> None:
    """The blocking official client reads our streams and bodies, too."""
    world.link.script = answer("Par", "is")

    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as blocking:
            messages: Any = [{"role": "user", "content": "hi"}]
            whole = blocking.chat.completions.create(model="tiny", messages=messages)
            with blocking.chat.completions.create(model="tiny", messages=messages, stream=True) as stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content, text

    assert await asyncio.to_thread(ask) == ("Paris", "Paris")


async def test_openai_client_logprobs(world: EdgeWorld) -> None:
    """The official client's types accept our logprobs."""
    world.link.script = with_logprobs
    async with client(world) as openai_client:
        completion = await openai_client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
        )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].top_logprobs[0].token == "é"


async def read_raw(world: EdgeWorld, request: bytes, *, until_eof: bool) -> bytes:
    reader, writer = await asyncio.open_connection(*world.address)
    writer.write(request)
    async with asyncio.timeout(5):
        raw = await (reader.read() if until_eof else reader.readuntil(b"\r\n0\r\n\r\n"))
    writer.close()
    await writer.wait_closed()
    return raw


def raw_request(version: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\nx-request-id: my-id.1\r\n\r\n".encode() + data


async def test_stream_bytes_over_http_1_1(world: EdgeWorld) -> None:
    """The edge frames chunks itself: every chunk is one event, its size is right, and the connection stays open."""
    world.link.script = answer("é", "b")
    request = raw_request("1.1", chat_body(stream=True))
    reader, writer = await asyncio.open_connection(*world.address)
    for _ in range(2):  # This is repeated over the same connection.
        writer.write(request)
        async with asyncio.timeout(5):
            raw = await reader.readuntil(b"\r\n0\r\n\r\n")
        head, _, rest = raw.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        assert lines[0] == "HTTP/1.1 200 OK"
        assert "x-request-id: my-id.1" in lines
        assert "Transfer-Encoding: chunked" in lines
        assert "Cache-Control: no-cache, no-transform" in lines
        events = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            events.append(rest[: int(size, 16)])
            assert rest[int(size, 16) :][:2] == b"\r\n"
            rest = rest[int(size, 16) + 2 :]
        assert events.pop() == b""
        assert all(re.fullmatch(rb"data: [^\n]+\n\n", event) for event in events)
        assert '"content":"é"'.encode() in events[1]
        assert events[-1] == b"data: [DONE]\n\n"
    writer.close()
    await writer.wait_closed()


async def test_stream_bytes_over_http_1_0(world: EdgeWorld) -> None:
    """HTTP/1.0 clients do not know chunks and get plain events until the connection closes."""
    world.link.script = answer("a")
    raw = await read_raw(world, raw_request("1.0", chat_body(stream=True)), until_eof=True)
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"Connection: close" in head
    assert rest.startswith(b"data: {")
    assert rest.endswith(b"data: [DONE]\n\n")
