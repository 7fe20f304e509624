"""Answers that are not streamed are bounded while they are collected, and are sent whole."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import pytest

from edge_http.admission import EdgeSettings
from edge_http.answers.streamed_answer import StreamedAnswer
from edge_http.formatting.collected_choice import CollectedChoice
from edge_http.wire.large_body import PIECE_BYTES
from kvloom.v1.generation_pb2 import TokenLogprobs
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import FakeRequest
from tests.fakes.resume_world import CHAT
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "the fox"}], "logprobs": True, "top_logprobs": 3},
    "/v1/completions": {"prompt": "the fox", "logprobs": 3},
}
TOKENS = [65, 256, 70, 7]
TEXT = ['"', "\n", "\N{SLIGHTLY SMILING FACE}", "plain"]


def logprobs(token_id: int, number: int) -> TokenLogprobs:
    top = [(token_id + i) % 256 for i in range(3)]
    return TokenLogprobs(logprob=-0.125 * number, top_token_ids=top, top_logprobs=[-0.5, -1e-7, float("-inf")])


def begin(world: EdgeWorld, path: str = CHAT, key: str = "one", **fields: Any) -> asyncio.Task[tuple[int, Any]]:
    body = {"model": "tiny", **PATHS[path], **fields}
    return asyncio.create_task(world.post(path, body, headers={"Authorization": f"Bearer {key}"}))


def send(request: FakeRequest, num_tokens: int, index: int = 0) -> None:
    for number in range(num_tokens):
        token_id = TOKENS[number % 4]
        request.tokens(TEXT[number % 4], index, token_ids=[token_id], logprobs=[logprobs(token_id, number)])


@pytest.mark.parametrize("path", PATHS)
async def test_answer_that_grows_too_large_is_ended(path: str) -> None:
    """It fails at once, before the fabric and the edge have spent more on it, and says which limit it met."""
    async with edge_world(EdgeSettings(max_answer_bytes=4096)) as world:
        asking = begin(world, path)
        request = await world.link.next_request()
        request.start()
        send(request, 60)
        status, answer = await asking
        assert status == 400
        assert answer["error"]["code"] == "answer_too_large"
        assert "4096 bytes" in answer["error"]["message"]
        assert request.cancelled.is_set()
        assert world.edge.admission.collected.num_bytes == 0


async def test_an_answer_whose_client_left_is_freed_at_once() -> None:
    """A busy edge seldom looks for garbage: what waited for that would fill its memory. The same holds for an answer
    that grew too large."""
    gc.collect()
    gc.disable()
    num_others = num_collected_choices()  # of earlier tests
    try:
        async with edge_world(EdgeSettings(max_answer_bytes=64_000)) as world:
            asking = begin(world, n=2)
            request = await world.link.next_request()
            for index in range(2):
                request.start(index)
                send(request, 40, index)
            assert num_collected_choices() == num_others + 2
            asking.cancel()
            await request.cancelled.wait()
            await eventually(lambda: num_collected_choices() <= num_others, "the end of what was collected")
            too_large = begin(world)
            request = await world.link.next_request()
            request.start()
            send(request, 1000)
            assert (await too_large)[0] == 400
            await eventually(lambda: num_collected_choices() <= num_others, "the end of what was collected")
    finally:
        gc.enable()


async def test_a_stream_that_ended_waits_for_no_garbage_collector() -> None:
    """The record of a request and its answer referred to one another: some 30 objects a request stayed until the
    garbage collector came, which took a tenth of a busy edge's time, and each request got memory that was in no
    cache."""
    gc.collect()
    gc.disable()
    try:
        async with edge_world() as world:
            body = {"model": "tiny", **PATHS["/v1/completions"], "stream": True}
            for _ in range(10):
                asking = asyncio.ensure_future(world.http.post(world.url + "/v1/completions", json=body))
                request = await world.link.next_request()
                request.start()
                request.finish()
                await (await asking).read()
                world.link.requests.clear()
                world.link._by_handle.clear()
                del request
            num_left = sum(type(each) is StreamedAnswer for each in gc.get_objects())
            assert num_left <= 2, "the last ones may still be in use"
    finally:
        gc.enable()


def num_collected_choices() -> int:
    """That are still in memory."""
    return sum(type(each) is CollectedChoice for each in gc.get_objects())  # isinstance wakes lazy objects


async def test_one_caller_cannot_take_all_memory_for_answers() -> None:
    """Unfinished answers would otherwise fill the process, or cause all other requests to be refused."""
    config = EdgeSettings(max_pending_answer_bytes=2**20, max_answer_bytes=2**19)
    async with edge_world(config) as world:
        begun = [begin(world), begin(world), begin(world, key="two")]
        requests = [await world.link.next_request() for _ in begun]
        for request in requests:
            request.start()
        requests[0].tokens("x" * 300_000)
        requests[1].tokens("x" * 300_000)
        status, answer = await begun[1]
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        requests[2].tokens("x" * 300_000)
        for request in requests:
            request.finish()
        assert [(await begun[i])[0] for i in (0, 2)] == [200, 200]
        assert world.edge.admission.collected.num_bytes == 0


@pytest.mark.parametrize("path", PATHS)
async def test_large_answer_is_whole(path: str) -> None:
    """It is put together and sent in pieces, which must be the same JSON."""
    async with edge_world() as world:
        asking = begin(world, path, n=2)
        request = await world.link.next_request()
        for index in (0, 1):
            request.start(index)
            send(request, 400, index)
            request.finish(index=index)
        status, answer = await asking
        assert status == 200
        assert len(json.dumps(answer)) > PIECE_BYTES
        assert answer["usage"]["completion_tokens"] == 800
        tokenizer = model_tokenizer()
        for index, choice in enumerate(answer["choices"]):
            assert choice["index"] == index
            assert choice["finish_reason"] == "stop"
            if path == CHAT:
                assert choice["message"] == {"role": "assistant", "content": "".join(TEXT) * 100, "refusal": None}
                entries = choice["logprobs"]["content"]
                assert choice["logprobs"]["refusal"] is None
                assert [bytes(entry["bytes"]) for entry in entries] == [tokenizer.token_bytes(i) for i in TOKENS] * 100
                assert [entry["logprob"] for entry in entries] == [-0.125 * number for number in range(400)]
                assert [top["logprob"] for top in entries[7]["top_logprobs"]] == pytest.approx([-0.5, -1e-7, -9999.0])
            else:
                assert choice["text"] == "".join(TEXT) * 100
                assert {name: len(values) for name, values in choice["logprobs"].items()} == dict.fromkeys(
                    ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 400
                )
