"""Whatever bytes a client posts, the edge's decoders answer with a typed body or with an error that is the client's."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_http.openai.messages import chat_messages
from edge_http.openai.prompt import chat_prompt, completion_prompts
from edge_http.openai.requests import ChatBody, CompletionBody, decode_chat, decode_completion
from edge_http.openai.sampling import (
    chat_max_tokens,
    chat_sampling,
    completion_max_tokens,
    completion_sampling,
    num_choices,
    stop_conditions,
)
from edge_http.openai.tools import tools_of
from edge_http.openai.unsupported import CHAT, COMPLETION
from kvloom.errors import KvloomError
from kvloom_common.conversation.tool_plan import plan_tools
from tests.examples import num_examples
from tests.fakes.tiny_tokenizer import model_tokenizer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.sampled_from([0, 1, -1, 2, 16, 17, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**40, 0.5, -0.0, 1e308])
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text")}, optional={"text": st.text(max_size=8)}), max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "developer", "tool"]),
            "content": st.text(max_size=8) | PARTS | JSON,
        },
        optional={"name": st.text(max_size=3), "tool_calls": st.none() | JSON},
    ),
    max_size=3,
)
PROMPTS = st.text(max_size=8) | st.lists(st.text(max_size=4) | NUMBERS | st.lists(NUMBERS, max_size=3), max_size=3)


def bodies(struct: type[msgspec.Struct], refused: Any, **required: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Plausible bodies with any value in a few of the optional fields, so that the checks behind the first are met."""
    names = [name for name in (*struct.__struct_fields__, *refused) if name not in required]
    some = st.lists(st.sampled_from(names), max_size=3, unique=True)
    fields = some.flatmap(lambda chosen: st.fixed_dictionaries(dict.fromkeys(chosen, JSON | NUMBERS)))
    good = st.fixed_dictionaries({"model": st.just("tiny"), **required})
    return st.builds(lambda first, second: first | second, good, fields)


async def read_chat(raw: bytes) -> None:
    body: ChatBody = decode_chat(raw, 64)
    num_choices(body)
    chat_sampling(body)
    stop_conditions(body, chat_max_tokens(body)[0])
    given_tools = tools_of(body)
    plan = plan_tools(given_tools.tools, given_tools.choice, is_parallel=given_tools.is_parallel)
    prompt, _ = await chat_prompt(chat_messages(body.messages), plan.tools, {}, model_tokenizer(), scope="")
    assert prompt.token_ids


async def read_completion(raw: bytes) -> None:
    body: CompletionBody = decode_completion(raw)
    n = num_choices(body)
    completion_sampling(body)
    stop_conditions(body, completion_max_tokens(body))
    prompts = await completion_prompts(body, n, model_tokenizer(), scope="")
    assert all(prompt.token_ids for prompt in prompts)


async def check(raw: bytes) -> None:
    for read in (read_chat, read_completion):
        try:
            await read(raw)
        except KvloomError as error:
            if not 400 <= error.kind.http_status < 500:
                raise


@settings(max_examples=num_examples(150), deadline=None)
@given(raw=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
async def test_any_bytes(raw: bytes) -> None:
    """Noise is refused, never a crash."""
    await check(raw)


SCHEMAS = st.fixed_dictionaries({"type": st.just("object")}, optional={"properties": JSON, "$ref": st.text(max_size=4)})
FUNCTIONS = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "g", ""])}, optional={"parameters": SCHEMAS | JSON, "strict": st.booleans()}
)
TOOLS = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS}), max_size=3)
CHOICES = st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from(["a", "b"]),
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": st.just("f"), "arguments": JSON.map(json.dumps) | st.text()}),
        }
    ),
    max_size=2,
)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.just("assistant"), "tool_calls": CALLS}, optional={"content": st.text()})
    | st.fixed_dictionaries(
        {"role": st.just("tool"), "tool_call_id": st.sampled_from(["a", "b"]), "content": st.text(max_size=8)}
    ),
    max_size=4,
)


@settings(max_examples=num_examples(200), deadline=None)
@given(body=bodies(ChatBody, CHAT, messages=TURNS | MESSAGES, tools=TOOLS, tool_choice=CHOICES))
async def test_any_tools_and_calls(body: Any) -> None:
    """The same for plausible tools, choices and histories of calls."""
    await check(json.dumps(body).encode())


@settings(max_examples=num_examples(200), deadline=None)
@given(body=bodies(ChatBody, CHAT, messages=MESSAGES | JSON))
async def test_any_chat_values(body: Any) -> None:
    """Every value of every field is taken or refused by the checks, not by a stack trace further in."""
    await check(json.dumps(body).encode())


@settings(max_examples=num_examples(200), deadline=None)
@given(body=bodies(CompletionBody, COMPLETION, prompt=PROMPTS | JSON))
async def test_any_completion_values(body: Any) -> None:
    """The same for plain completions with all kinds of prompts."""
    await check(json.dumps(body).encode())


@settings(max_examples=num_examples(200), deadline=None)
@given(data=st.data())
async def test_broken_json(data: st.DataObject) -> None:
    """A good body with bytes cut out, doubled or changed."""
    raw = bytearray(json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "é\ud83d\ude42"}]}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not raw:
            break
    await check(bytes(raw))
