"""Whatever one of our APIs has answered can be sent back to any of them, wherever the answer was cut off."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom_common.parsers.spec import ParserSpec
from tests.examples import num_examples
from tests.fakes.edge_world import EdgeWorld, edge_world
from tests.fakes.fake_router_link import LENGTH, answer

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = {
    "chat": [{"type": "function", "function": {"name": "edit", "parameters": SCHEMA}}],
    "responses": [{"type": "function", "name": "edit", "parameters": SCHEMA}],
    "messages": [{"name": "edit", "input_schema": SCHEMA}],
}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
RESULT = "The call was cut off."
NEXT = "Please continue."

texts = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=12)
arguments = st.dictionaries(st.sampled_from(["path", "é", 'a"b']), texts | st.integers() | st.none(), max_size=3).map(
    lambda value: json.dumps(value)
)
calls = arguments.map(lambda value: f'<tool_call>\n{{"name": "edit", "arguments": {value}}}\n</tool_call>')
outputs = st.tuples(texts.map(lambda text: f"<think>{text}</think>") | st.just(""), texts, st.lists(calls, max_size=2))


def request_of(api: str, history: list[Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", "tools": TOOLS[api]}
    if api == "messages":
        body["max_tokens"] = 100
    return body | {"input" if api == "responses" else "messages": history}


def own_history(api: str, answered: Any) -> list[Any]:
    """What a client of that API sends back: the answer, a result for each of its calls, and its next message."""
    if api == "chat":
        message = answered["choices"][0]["message"]
        ids = [call["id"] for call in message.get("tool_calls") or ()]
        results = [{"role": "tool", "tool_call_id": call_id, "content": RESULT} for call_id in ids]
        return [message, *results, {"role": "user", "content": NEXT}]
    if api == "responses":
        ids = [item["call_id"] for item in answered["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call_id, "output": RESULT} for call_id in ids]
        return [*answered["output"], *results, {"role": "user", "content": NEXT}]
    ids = [block["id"] for block in answered["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call_id, "content": RESULT} for call_id in ids]
    answer_blocks = {"role": "assistant", "content": answered["content"]}
    return [answer_blocks, {"role": "user", "content": [*results, {"type": "text", "text": NEXT}]}]


def turn_of(api: str, answered: Any) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Thoughts, text and calls (id, name, arguments) of an answer, as a client that changes servers keeps them."""
    if api == "chat":
        message = answered["choices"][0]["message"]
        made = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        return (
            message.get("reasoning_content") or "",
            message["content"] or "",
            [(call_id, function["name"], function["arguments"]) for call_id, function in made],
        )
    found: tuple[str, str, list[tuple[str, str, str]]] = ("", "", [])
    thoughts, text, made_calls = found
    if api == "responses":
        for item in answered["output"]:
            if item["type"] == "function_call":
                made_calls.append((item["call_id"], item["name"], item["arguments"]))
            elif item["type"] == "reasoning":
                thoughts += "".join(part["text"] for part in item["content"])
            else:
                text += "".join(part["text"] for part in item["content"])
        return thoughts, text, made_calls
    for block in answered["content"]:
        if block["type"] == "tool_use":
            made_calls.append((block["id"], block["name"], json.dumps(block["input"])))
        else:
            thoughts += block.get("thinking", "")
            text += block.get("text", "")
    return thoughts, text, made_calls


def other_history(api: str, turn: tuple[str, str, list[tuple[str, str, str]]]) -> list[Any]:
    thoughts, text, made = turn
    if api == "chat":
        listed = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": sent}}
            for call_id, name, sent in made
        ]
        message = {"role": "assistant", "content": text or None, "reasoning": thoughts, "tool_calls": listed or None}
        return own_history("chat", {"choices": [{"message": message}]})
    if api == "responses":
        items: list[Any] = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": thoughts}]}]
        items.append({"type": "message", "role": "assistant", "content": text})
        items += [{"type": "function_call", "call_id": each, "name": n, "arguments": sent} for each, n, sent in made]
        return own_history("responses", {"output": items})
    blocks: list[Any] = [{"type": "thinking", "thinking": thoughts, "signature": ""}, {"type": "text", "text": text}]
    for call_id, name, sent in made:
        try:
            value = json.loads(sent)
        except ValueError:  # this API has no place for what is no JSON
            value = {"text": sent}
        blocks.append({"type": "tool_use", "id": call_id, "name": name, "input": value})
    return own_history("messages", {"content": blocks})


USER = {"role": "user", "content": "Go on."}


async def check(world: EdgeWorld, output: str, cut: int, size: int) -> None:
    shown = output[:cut]
    for api, path in PATHS.items():
        world.link.script = answer(*(shown[i : i + size] for i in range(0, len(shown), size)), reason=LENGTH)
        status, answered = await world.post(path, request_of(api, [USER]))
        assert status == 200, (api, answered)
        turn = turn_of(api, answered)
        world.link.script = answer("fine")
        for other, other_path in PATHS.items():
            history = own_history(api, answered) if other == api else other_history(other, turn)
            ends = [history]
            if not turn[2]:
                ends.append(history[:-1])  # nothing after what was cut off
            for end in ends:
                status, body = await world.post(other_path, request_of(other, [USER, *end]))
                assert status == 200, (api, other, end, body)


@settings(max_examples=num_examples(60), deadline=None)
@given(output=outputs, data=st.data())
async def test_answers_can_be_sent_back(output: tuple[str, str, list[str]], data: st.DataObject) -> None:
    """A refusal would repeat at every later turn: the conversation would be dead."""
    thoughts, text, made = output
    whole = "\n".join((thoughts + text, *made))
    cut = data.draw(st.integers(0, len(whole)), label="cut")
    async with edge_world(output=ParserSpec(tools="hermes", reasoning="qwen3")) as world:
        await check(world, whole, cut, data.draw(st.integers(1, 9), label="size"))
