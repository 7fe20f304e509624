"""Extensions of other servers' APIs that clients send: they do what they do there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from edge_http.endpoints.generation import template_options
from edge_http.openai.requests import ChatBody
from kvloom.v1.generation_pb2 import Guide
from kvloom_common.parsers.spec import ParserSpec
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import answer

USER = {"role": "user", "content": "the fox"}


@pytest.fixture
async def world() -> AsyncIterator[EdgeWorld]:
    async with edge_world(output=ParserSpec(tools="hermes", reasoning="qwen3")) as started:
        started.link.script = answer("fine")
        yield started


def last(world: EdgeWorld) -> Any:
    return world.link.requests[-1].request


def prompt_of(world: EdgeWorld) -> str:
    tokenizer = world.edge.models.by_name["tiny"].tokenizer
    return tokenizer.decode(last(world).prompt_token_ids, skip_special_tokens=False)


async def test_the_last_message_is_continued(world: EdgeWorld) -> None:
    """As in vLLM, by which clients prefill answers in chat completions."""
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    status, body = await world.chat(messages=[USER, {"role": "assistant", "content": "Sure: the"}], **fields)
    assert status == 200, body
    assert prompt_of(world).endswith("Sure: the")


async def test_a_prompt_is_cut_from_the_left(world: EdgeWorld) -> None:
    """What is used is what is metered and screened."""
    assert (await world.chat())[0] == 200
    whole = list(last(world).prompt_token_ids)
    status, body = await world.chat(truncate_prompt_tokens=3)
    assert (status, body["usage"]["prompt_tokens"]) == (200, 3)
    assert list(last(world).prompt_token_ids) == whole[-3:]
    assert last(world).submit.prompt_text == ""
    completion = {"model": "tiny", "prompt": "the quick brown fox " * 2000, "max_tokens": 5}
    assert (await world.post("/v1/completions", completion))[0] == 400
    status, body = await world.post("/v1/completions", completion | {"truncate_prompt_tokens": -1})
    assert (status, body["usage"]["prompt_tokens"]) == (200, 4096 - 5)


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({"guided_json": {"type": "object"}}, Guide(json_schema='{"type": "object"}')),
        ({"guided_regex": "a+"}, Guide(regex="a+")),
        ({"guided_grammar": 'start: "a"'}, Guide(grammar='start: "a"')),
        ({"guided_choice": ["a", "b"], "guided_decoding_backend": "xgrammar"}, None),
    ],
)
async def test_the_predecessors_of_structured_outputs(
    world: EdgeWorld, fields: dict[str, Any], guide: Guide | None
) -> None:
    """Older clients of vLLM have no other way to ask for a form."""
    status, body = await world.chat(**fields)
    assert status == 200, body
    given = last(world).wanted.sampling.guide
    assert given == guide if guide is not None else list(given.choice.texts) == ["a", "b"]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"reasoning": {"effort": "low", "exclude": False}}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, {"enable_thinking": True}),
        ({"enable_thinking": False, "chat_template_kwargs": {"a": [1]}}, {"enable_thinking": False, "a": [1]}),
        ({"reasoning_effort": "max"}, {"reasoning_effort": "max", "enable_thinking": True}),
    ],
)
def test_other_ways_to_say_how_much_to_think(fields: dict[str, Any], options: dict[str, Any]) -> None:
    """Each service has its own; they mean the same variables of the template."""
    body = msgspec.convert({"model": "m", "messages": [USER], **fields}, ChatBody)
    assert template_options(body) == options


async def test_special_tokens_are_shown(world: EdgeWorld) -> None:
    """All but those that end the answer."""
    assert (await world.chat(skip_special_tokens=False))[0] == 200
    tokenizer = world.edge.models.by_name["tiny"].tokenizer
    wanted = set(tokenizer.special_token_ids(tokenizer.special_tokens)) - tokenizer.eos_token_ids
    assert wanted
    assert set(last(world).wanted.sampling.shown_special_token_ids) >= wanted


async def test_off_is_off(world: EdgeWorld) -> None:
    """-1 is vLLM's and SGLang's way to say all tokens, and a nucleus of nothing is the likeliest token."""
    assert (await world.chat(top_k=-1, top_p=0))[0] == 200
    assert (last(world).wanted.sampling.top_k, last(world).wanted.sampling.top_p) == (0, 0)


async def test_hints_are_counted(world: EdgeWorld) -> None:
    """The operator sees what clients send that is not known here."""
    assert (await world.chat(rid="x"))[0] == 200
    assert 'kvloom_edge_ignored_fields_total{field="rid"} 1.0' in world.edge.metrics.exposition().decode()
    refused = await world.post(
        "/v1/chat/completions", {"model": "tiny", "messages": [USER], "rid": "x"}, headers=STRICT
    )
    assert (refused[0], refused[1]["error"]["param"]) == (400, "rid")
    assert (await world.post("/v1/embeddings", {"model": "tiny", "input": "x", "rid": 1}, headers=STRICT))[0] == 400
    assert (await world.post("/tokenize", {"model": "tiny", "prompt": "x", "rid": 1}))[0] == 200


STRICT = {"x-kvloom-strict": "true"}


async def test_stop_strings_concern_the_answer(world: EdgeWorld) -> None:
    """Thoughts quote the question; what stops in them would leave the client without an answer."""
    await world.chat(stop=["x"])
    span = last(world).wanted.stop.reasoning
    assert (list(span.openings), list(span.closings), span.begins_inside) == (["<think>"], ["</think>"], False)
    await world.post("/v1/messages", {"model": "tiny", "messages": [USER], "max_tokens": 5, "stop_sequences": ["x"]})
    assert list(last(world).wanted.stop.reasoning.closings) == ["</think>"]
    for path, body in (
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/completions", {"prompt": "a", "stop": "x"}),
    ):
        await world.post(path, {"model": "tiny", **body})
        assert not last(world).wanted.stop.HasField("reasoning")


@pytest.mark.parametrize(
    ("family", "opening", "begins_inside"),
    [
        ("deepseek_r1", "<think>", True),
        ("qwen3", "<think>", False),
        ("kimi", "◁think▷", False),
        ("mistral", "[THINK]", False),
        ("granite", "Here is my thought process:", False),
        ("harmony", "<|channel|>analysis", False),
    ],
)
async def test_every_family_says_where_its_reasoning_is(family: str, opening: str, begins_inside: bool) -> None:
    """A family that forgets it would have its thoughts cut off."""
    tools = "harmony" if family == "harmony" else None
    async with edge_world(output=ParserSpec(tools=tools, reasoning=family)) as world:
        world.link.script = answer("x")
        await world.chat(stop=["x"])
        span = last(world).wanted.stop.reasoning
        assert opening in span.openings
        assert span.closings
        assert span.begins_inside == begins_inside
