"""Tools and reasoning over gRPC: what the model is told, and the typed output that clients of `Generate` get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

import kvloom
from kvloom import ChatMessage, Client
from kvloom.client.answer import AnswerBuilder
from kvloom.client.migrating_generation import MigratingGeneration
from kvloom.transport.grpc_errors import from_rpc_error
from kvloom.v1.generation_pb2 import (
    FINISH_REASON_STOP,
    FINISH_REASON_TOOL_CALLS,
    Guide,
    SamplingParams,
    SequenceFinish,
    StopConditions,
)
from kvloom.v1.router_service_pb2 import (
    TOOL_CHOICE_MODE_NONE,
    TOOL_CHOICE_MODE_REQUIRED,
    ChoiceDelta,
    Conversation,
    GenerateRequest,
    GenerateResponse,
    Message,
    PartialChoice,
    PlanRequest,
    ResumeRequest,
    TokenIds,
    Tool,
    ToolCall,
    ToolChoice,
)
from tests.examples import SOME_OR_ALL
from tests.fakes.fake_shard import FakeShard
from tests.fakes.router_world import MODEL, RouterWorld

pytest_plugins = ("tests.fakes.router_fixtures",)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED_SCHEMA = SCHEMA | {"additionalProperties": False}
WEATHER = Tool(name="get_weather", description="The weather.", parameters=json.dumps(SCHEMA))
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslø \\"é\\""}}\n</tool_call>'
OUTPUT = f"<think>Hm, né?</think>Let me look.\n{CALL}\n{CALL}"
QUESTION = Conversation(messages=[Message(role="user", content="Weather?")])
REQUIRED = ToolChoice(mode=TOOL_CHOICE_MODE_REQUIRED)

Part = tuple[str, ...]


async def start(world: RouterWorld, output: str = OUTPUT, size: int = 1, **options: Any) -> FakeShard:
    """A router, and a shard whose answers are `output`, in tokens of `size` bytes, as far as characters allow."""
    world.config.model.reasoning_parser = "qwen3"
    shard = await world.start_shard("shard-0", script=script(world, output, size), step_seconds=0, **options)
    shard.info.capabilities.append("guided")
    await world.start_router()
    await world.wait_for_shards(await world.connect(), 1)
    return shard


def script(world: RouterWorld, text: str, size: int = 1) -> list[tuple[int, str]]:
    """The tokens of a text; with `size` above 1, some texts come late, as those of incomplete characters do."""
    pieces: list[tuple[int, str]] = []
    held = ""
    for character in text:
        pieces.extend((token_id, "") for token_id in world.tokenizer.encode_now(character))
        held += character
        if len(held) >= size:
            pieces[-1] = (pieces[-1][0], held)
            held = ""
    pieces[-1] = (pieces[-1][0], pieces[-1][1] + held)
    return pieces


def wanted(**fields: Any) -> GenerateRequest:
    defaults = {"model": MODEL, "conversation": QUESTION, "request_id": "mine", "tools": [WEATHER]}
    sampling = SamplingParams(seed=7)
    return GenerateRequest(**{**defaults, "stop": StopConditions(max_tokens=1000), "sampling": sampling, **fields})


async def collect(world: RouterWorld, **fields: Any) -> list[GenerateResponse]:
    return [response async for response in (await world.stub()).Generate(wanted(**fields))]


def deltas_of(responses: Sequence[GenerateResponse], index: int = 0) -> list[ChoiceDelta]:
    return [delta for response in responses for delta in response.deltas if delta.index == index]


def merged(deltas: Sequence[ChoiceDelta]) -> list[Part]:
    """The output with neighbours of one kind joined."""
    parts: list[Part] = []

    def add(kind: str, *values: str) -> None:
        if parts and kind in ("text", "reasoning", "arguments") and parts[-1][:-1] == (kind, *values[:-1]):
            parts[-1] = (*parts[-1][:-1], parts[-1][-1] + values[-1])
        elif values[-1:] != ("",):
            parts.append((kind, *values))

    for delta in deltas:
        if not delta.output:
            add("text", delta.text)
            continue
        assert delta.text == "".join(part.text for part in delta.output)
        for part in delta.output:
            match part.WhichOneof("part"):
                case "tool_call_start":
                    start = part.tool_call_start
                    add("start", str(start.index), start.id, start.name)
                case "tool_call_arguments":
                    add("arguments", str(part.tool_call_arguments.index), part.tool_call_arguments.text)
                case "tool_call_end":
                    add("end", str(part.tool_call_end.index))
                case kind:
                    add(str(kind), getattr(part, str(kind)))
    return parts


def finish_of(deltas: Sequence[ChoiceDelta]) -> SequenceFinish:
    return deltas[-1].finish


async def test_output_is_typed_and_in_order(world: RouterWorld) -> None:
    """A client of the RPC gets reasoning, text and calls as data, and learns that it has to run the calls."""
    await start(world)
    deltas = deltas_of(await collect(world))
    parts = merged(deltas)
    assert parts[0] == ("reasoning", "Hm, né?")
    assert parts[1] == ("text", "Let me look.")
    starts = [part for part in parts if part[0] == "start"]
    assert [(number, name) for _, number, _, name in starts] == [("0", "get_weather"), ("1", "get_weather")]
    assert len({call_id for _, _, call_id, _ in starts}) == 2
    arguments = [json.loads(part[2]) for part in parts if part[0] == "arguments"]
    assert arguments == [{"city": 'Oslø "é"'}] * 2
    assert [part[1] for part in parts if part[0] == "end"] == ["0", "1"]
    assert finish_of(deltas).reason == FINISH_REASON_TOOL_CALLS
    assert deltas[-1].num_delivered_chars == len(OUTPUT)


@pytest.mark.parametrize("size", [2, 5, 17, 1000])
async def test_any_split_gives_the_same_output(world: RouterWorld, size: int) -> None:
    """How tokens and steps cut the text must not matter to a client, down to the ids of the calls."""
    shard = await start(world)
    whole = merged(deltas_of(await collect(world)))
    shard.script = script(world, OUTPUT, size)
    assert merged(deltas_of(await collect(world))) == whole


@pytest.mark.parametrize("stride", SOME_OR_ALL)
@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("size", [1, 7])
async def test_an_answer_continues_anywhere(world: RouterWorld, size: int, resumable: bool, stride: int) -> None:
    """A client whose router is lost in the middle of a call's arguments gets the rest of them, exactly."""
    shard = await start(world, size=size)
    given = await collect(world)
    deltas = deltas_of(given)
    whole = merged(deltas)
    for cut in range(1, len(deltas), 4 * stride):
        head = deltas[:cut]
        token_ids = [token_id for delta in head for token_id in delta.token_ids]
        partial = PartialChoice(token_ids=token_ids, num_delivered_chars=head[-1].num_delivered_chars)
        rest = deltas_of(await collect(world, partial_choices=[partial], resumable=resumable))
        assert merged([*head, *rest]) == whole, cut
        assert finish_of(rest).reason == FINISH_REASON_TOOL_CALLS
        sent = shard.submits[-1].choices[0]
        assert (list(sent.output_token_ids), sent.num_delivered_chars) == (token_ids, partial.num_delivered_chars)


async def test_a_resumed_stream_replays_typed_output(world: RouterWorld) -> None:
    """What a client missed comes again exactly as it was, typed output among it."""
    await start(world)
    fields: dict[str, Any] = {"resumable": True, "resume_token": "a-secret-of-my-own"}
    whole = await collect(world, **fields)
    assert merged(deltas_of(whole))[0] == ("reasoning", "Hm, né?")
    stub = await world.stub()
    for after in (0, len(whole) // 2):
        asked = ResumeRequest(request_id="mine", resume_token="a-secret-of-my-own", starting_after=after)
        assert [message.response async for message in stub.Resume(asked)] == whole[after:]


async def test_plain_prompts_are_not_parsed(world: RouterWorld) -> None:
    """Text and token ids are completions: what the model writes is the answer, whatever it looks like."""
    await start(world)
    for prompt in ({"text": "x"}, {"token_ids": TokenIds(ids=[3])}):
        deltas = deltas_of(await collect(world, **prompt, tools=[]))
        assert "".join(delta.text for delta in deltas) == OUTPUT
        assert not any(delta.output or delta.HasField("num_delivered_chars") for delta in deltas)
        assert finish_of(deltas).reason == FINISH_REASON_STOP
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(world, **prompt)
        assert from_rpc_error(caught.value).field == "tools"


async def test_calls_stay_text_without_tools(world: RouterWorld) -> None:
    """A conversation without tools, or whose choice is none, has no calls; reasoning is still told apart."""
    await start(world)
    none = ToolChoice(mode=TOOL_CHOICE_MODE_NONE)
    for fields in ({"tools": []}, {"tool_choice": none}):
        deltas = deltas_of(await collect(world, **fields))
        text = OUTPUT.removeprefix("<think>Hm, né?</think>")
        assert merged(deltas) == [("reasoning", "Hm, né?"), ("text", text)]
        assert finish_of(deltas).reason == FINISH_REASON_STOP


async def test_a_required_call_is_guided(world: RouterWorld) -> None:
    """A demanded call comes as JSON under a guide, which is why it cannot be malformed; a caller's guide is refused."""
    shard = await start(world, '{"name": "get_weather", "arguments": {"city": "Oslo"}}')
    deltas = deltas_of(await collect(world, tool_choice=REQUIRED))
    assert [part[0] for part in merged(deltas)] == ["start", "arguments", "end"]
    assert json.loads(merged(deltas)[1][2]) == {"city": "Oslo"}
    guide = json.loads(shard.submits[-1].sampling.guide.json_schema)
    assert guide["properties"]["name"] == {"const": "get_weather"}
    guided = SamplingParams(seed=7, guide=Guide(regex="x"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(world, tool_choice=REQUIRED, sampling=guided)
    assert from_rpc_error(caught.value).field == "sampling.guide"


async def test_calls_of_strict_tools_are_guided_in_free_text(world: RouterWorld) -> None:
    """A strict tool's schema holds although the model is free to call; a caller's own guide has precedence."""
    shard = await start(world)
    strict = Tool(name="get_weather", parameters=json.dumps(SCHEMA), strict=True)
    deltas = deltas_of(await collect(world, tools=[strict, Tool(name="get_time")]))
    assert [part[0] for part in merged(deltas)].count("start") == 2
    guide = shard.submits[-1].sampling.guide.structural_tags
    assert list(guide.triggers) == ["<tool_call>"]
    assert [json.loads(tag.json_schema) for tag in guide.tags] == [CLOSED_SCHEMA, {"type": "object"}]
    arguments = CALL.partition('"arguments": ')[2].removesuffix("}\n</tool_call>")
    assert guide.tags[0].begin + arguments + guide.tags[0].end == CALL
    await collect(world, tools=[strict], sampling=SamplingParams(seed=1, guide=Guide(regex="x")))
    assert shard.submits[-1].sampling.guide.regex == "x"


async def test_strict_is_refused_where_it_cannot_be_kept(world: RouterWorld) -> None:
    """A promise that a model's format does not allow is refused by name, not dropped."""
    world.config.model.tool_parser = "pythonic"
    await start(world)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(world, tools=[Tool(name="f"), Tool(name="g", strict=True)])
    error = from_rpc_error(caught.value)
    assert (error.reason_name, error.field) == ("UNSUPPORTED_PARAMETER", "tools[1].strict")


async def test_the_history_reaches_the_model(world: RouterWorld) -> None:
    """An agent's next request has its calls and their results; `Plan` counts the same prompt."""
    shard = await start(world, "ok")
    call = ToolCall(id="c1", name="get_weather", arguments='{"city": "Oslo"}')
    turns = [
        Message(role="user", content="Weather?"),
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", tool_call_id="c1", content="Snow."),
    ]
    fields = {"conversation": Conversation(messages=turns)}
    deltas = deltas_of(await collect(world, **fields))
    prompt_ids = shard.submits[-1].prompt_token_ids
    prompt = world.tokenizer.decode(prompt_ids, skip_special_tokens=False)
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}' in prompt
    assert "Snow." in prompt
    assert '"description":"The weather."' in prompt
    assert merged(deltas) == [("text", "ok")]
    plan = await (await world.stub()).Plan(PlanRequest(request=wanted(**fields)))
    assert plan.num_prompt_tokens == finish_of(deltas).num_prompt_tokens


async def test_the_sdk_gives_calls_and_reasoning(world: RouterWorld) -> None:
    """A user of the SDK gets calls as objects, runs them, and continues with the answer's message and the results."""
    shard = await start(world)
    question = ChatMessage("user", "Weather?")
    tool = kvloom.Tool("get_weather", "The weather.", SCHEMA)
    async with Client(world.address) as client:
        answer = await client.complete(model=MODEL, messages=[question], tools=[tool])
        assert (answer.reasoning, answer.text) == ("Hm, né?", "Let me look.")
        assert [(call.name, call.parsed) for call in answer.tool_calls] == [("get_weather", {"city": 'Oslø "é"'})] * 2
        assert answer.finish_reason is kvloom.FinishReason.TOOL_CALLS
        results = [ChatMessage("tool", "Snow.", tool_call_id=call.id) for call in answer.tool_calls]
        await client.complete(model=MODEL, messages=[question, answer.message, *results], tools=[tool])
        openai_tool = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
        by_name = client.generate(
            model=MODEL,
            messages=[{"role": "user", "content": "Weather?"}],
            tools=[openai_tool],
            tool_choice={"name": "get_weather"},
            template_options={"enable_thinking": False},
        )
        async for _ in by_name:
            pass
    prompt = world.tokenizer.decode(shard.submits[-2].prompt_token_ids, skip_special_tokens=False)
    assert prompt.count("Snow.") == 2
    assert '"arguments": {"city": "Oslø' in prompt
    assert shard.submits[-1].sampling.guide.json_schema


async def test_the_sdk_continues_a_call_at_another_router(world: RouterWorld) -> None:
    """An answer that loses its connection in the middle of a call's arguments gives the same deltas in the end."""
    await start(world, size=4)
    request = wanted()
    generation = MigratingGeneration(request)
    whole = await collect(world)
    uncut = _answer([delta for response in whole for delta in generation.apply(response)])
    assert uncut.tool_calls[1].parsed == {"city": 'Oslø "é"'}
    stub = await world.stub()
    for cut in range(1, len(whole), 17):
        generation = MigratingGeneration(wanted())
        generation.next_request()
        deltas = [delta for response in whole[:cut] for delta in generation.apply(response)]
        async for response in stub.Generate(generation.next_request()):
            deltas += generation.apply(response)
        assert generation.is_complete
        assert _answer(deltas) == uncut, cut


def _answer(deltas: Sequence[kvloom.Delta]) -> kvloom.AnswerChoice:
    builder = AnswerBuilder(1)
    for delta in deltas:
        builder.add(delta)
    return builder.build("mine", 7).choices[0]


async def test_the_synchronous_client_does_the_same(world: RouterWorld) -> None:
    """Programs without an event loop call tools, too."""
    await start(world)

    def ask() -> tuple[str, str]:
        with kvloom.SyncClient(world.address) as client:
            tool = {"type": "function", "function": {"name": "get_weather"}}
            messages = [{"role": "user", "content": "Weather?"}]
            reasoning = arguments = ""
            for delta in client.generate(model=MODEL, messages=messages, tools=[tool]):
                reasoning += delta.reasoning
                arguments += "".join(call.arguments for call in delta.tool_calls if call.index == 0)
            return reasoning, arguments

    reasoning, arguments = await asyncio.to_thread(ask)
    assert reasoning == "Hm, né?"
    assert json.loads(arguments) == {"city": 'Oslø "é"'}
