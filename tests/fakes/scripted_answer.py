"""The updates that a router sends for a request, playable from any point on, for answers that continue at another
edge."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from edge_http.recovery.edge_membership import EdgeMembership
from kvloom.v1.generation_pb2 import TokenLogprobs
from kvloom_common.parsers.spec import ParserSpec
from kvloom_common.text.detokenizer import IncrementalDetokenizer
from tests.fakes.edge_peers import die
from tests.fakes.edge_world import EdgeWorld, chat_body
from tests.fakes.fake_router_link import FakeRequest
from tests.fakes.resume_world import CHAT
from tests.fakes.resuming_client import ResumingClient
from tests.fakes.tiny_tokenizer import model_tokenizer
from tests.waiting import eventually

COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
TEXT = ["Hel", "lo", "", " \N{SLIGHTLY SMILING FACE}", "! ", 'a "quoted" ', "", "line\n", "end"]
"""Deltas; an empty one is a token whose text is held back: half a character, or what may become a stop string."""
TOKENS = [(70 + i, text) for i, text in enumerate(TEXT)]


class Script:
    """The updates that a router sends for a request: deterministic, as those of real answers are."""

    def __init__(
        self,
        n: int = 1,
        *,
        logprobs: bool = False,
        tokens: Sequence[tuple[int, str]] = TOKENS,
        text: str = "",
    ) -> None:
        """`tokens`: the ids and what they add to the text. `text`: what the model writes instead, in its tokenizer's
        tokens."""
        if text:
            detokenizer = IncrementalDetokenizer(model_tokenizer())
            tokens = [(token_id, detokenizer.push((token_id,))) for token_id in model_tokenizer().encode_now(text)]
        self.tokens = tokens
        steps = [("start", index, 0) for index in range(n)]
        for i in range(len(tokens)):
            steps += [("token", index, i) for index in range(n)]
        steps += [("finish", index, 0) for index in reversed(range(n))]
        self.steps = steps
        self.logprobs = logprobs

    def play(self, request: FakeRequest, begin: int, end: int | None = None) -> None:
        partial_choices = {choice.index: choice for choice in request.request.partial_choices}
        for what, index, i in self.steps[begin:end]:
            if partial_choices and index not in partial_choices:
                continue
            if what == "start":
                request.start(index, num_cached_tokens=2)
            elif what == "token":
                logprobs = [TokenLogprobs(logprob=-0.5 - i, top_token_ids=[65, 66], top_logprobs=[-0.5, -1.5])]
                token_id, text = self.tokens[i]
                request.tokens(text, index, token_ids=[token_id], logprobs=logprobs if self.logprobs else ())
            else:
                request.finish(index=index)

    def check(self, request: FakeRequest, begin: int) -> None:
        """Asserts that `request` continues exactly behind the steps before `begin`."""
        done = self.steps[:begin]
        ended = {index for what, index, _ in done if what == "finish"}
        wanted: dict[int, tuple[list[int], int]] = {}
        for _, index, _ in self.steps:
            if index not in ended:
                delivered = [i for what, of, i in done if what == "token" and of == index]
                wanted[index] = ([self.tokens[i][0] for i in delivered], sum(len(self.tokens[i][1]) for i in delivered))
        partial_choices = {
            choice.index: (list(choice.token_ids), choice.num_chars) for choice in request.request.partial_choices
        }
        assert partial_choices == wanted

    def restart(self, request: FakeRequest, begin: int) -> None:
        """Start the remaining choices again, as a router does."""
        for choice in request.request.partial_choices:
            request.start(choice.index, shard_id="another", num_cached_tokens=9)
        self.play(request, max(begin, sum(what == "start" for what, _, _ in self.steps)))


def kinds() -> dict[str, tuple[str, dict[str, Any], Script]]:
    usage = {"stream_options": {"include_usage": True}}
    plain = {"model": "tiny", "prompt": "the fox", "stream": True}
    return {
        "chat": (CHAT, chat_body(stream=True), Script()),
        "chat with all": (
            CHAT,
            chat_body(stream=True, n=2, logprobs=True, top_logprobs=2, stop=["\n\n"], seed=2**63 + 5, **usage),
            Script(2, logprobs=True),
        ),
        "messages": (MESSAGES, messages_body(stream=True), Script()),
        "completion": (COMPLETIONS, {**plain, **usage}, Script()),
        "completion with all": (COMPLETIONS, {**plain, "n": 2, "logprobs": 2, **usage}, Script(2, logprobs=True)),
    }


CALLS = """<think>Two cities.</think>Let me look.
<tool_call>
{"name": "weather", "arguments": {"city": "Oslo", "days": [1, 2]}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {}}
</tool_call>"""
PARSED = ParserSpec(tools="hermes", reasoning="qwen3")


def parsed_kinds() -> dict[str, tuple[str, dict[str, Any], Script]]:
    """Answers that are taken apart, for edges whose model writes them as PARSED says."""
    usage = {"stream_options": {"include_usage": True}}
    tools = [{"type": "function", "function": {"name": "weather"}}]
    return {"chat with tools": (CHAT, chat_body(stream=True, tools=tools, n=2, **usage), Script(2, text=CALLS))}


def messages_body(**fields: Any) -> dict[str, Any]:
    """A body of Anthropic's API."""
    return {"model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "the fox"}], **fields}


def same_but_names(events: list[bytes]) -> list[bytes]:
    """Removes what differs between two requests."""
    return [
        re.sub(rb'"((item_|call_)?id|(created|completed)(_at)?|queue_time_seconds)":("[^"]*"|[\d.]+)', b"", event)
        for event in events
    ]


def client(world: EdgeWorld, path: str = CHAT, key: str = "secret", **headers: str) -> ResumingClient:
    return ResumingClient(world.url + path, {"Authorization": f"Bearer {key}", "x-kvloom-details": "true", **headers})


async def undisturbed(world: EdgeWorld, path: str, body: dict[str, Any], script: Script) -> list[bytes]:
    whole = client(world, path)
    reading = asyncio.create_task(whole.begin(body))
    script.play(await world.link.next_request(), 0)
    await reading
    assert whole.done
    return same_but_names(whole.events)


async def begin_live(world: EdgeWorld, path: str, body: dict[str, Any], script: Script, end: int, **headers: str):
    """Returns a client that reads up to the step `end`, and the router's end of its request."""
    streamed = client(world, path, **headers)
    reading = asyncio.create_task(streamed.begin(body))
    request = await world.link.next_request()
    script.play(request, 0, end)
    stream = next(reversed(world.edge.resume.streams.values()))
    await eventually(lambda: stream.num_visible == stream.num_events and len(streamed.events) == stream.num_events)
    return streamed, request, reading


async def kill(world: EdgeWorld, peers: EdgeMembership, reading: asyncio.Task[Any]) -> None:
    await die(world, peers)
    await asyncio.gather(reading, return_exceptions=True)


async def end_at(world: EdgeWorld, path: str, streamed: ResumingClient, script: Script, begin: int) -> None:
    """The client comes to another edge, which continues the answer behind the step `begin`, up to its end."""
    streamed.url = world.url + path
    back = asyncio.create_task(streamed.resume())
    rest = await world.link.next_request()
    script.check(rest, begin)
    script.play(rest, begin)
    assert await back == 200
