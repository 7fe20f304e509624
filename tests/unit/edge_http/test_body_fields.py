"""What becomes of fields of a body that are not known: hints pass, and what would change the answer is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
import structlog.testing

from edge_http.anthropic.requests import decode_messages
from edge_http.openai.requests import decode_chat, decode_completion
from edge_http.openai.responses.requests import decode_responses
from edge_http.wire.headers import STRICT
from edge_http.wire.unknown_fields import MAX_NAMES, UnknownFields
from kvloom.errors import KvloomError

MESSAGES = [{"role": "user", "content": "hi"}]


class Noted:
    """Rules that are not strict unless a header says so, and what they noted."""

    def __init__(self) -> None:
        self.fields: list[str] = []

    def is_strict(self, headers: Any) -> bool:
        return STRICT in headers

    def note(self, fields: Sequence[str]) -> None:
        self.fields += fields


def decode(api: str, fields: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[Any, list[str]]:
    """The body, and which fields were left out."""
    noted, more = Noted(), headers or {}
    match api:
        case "chat":
            body = decode_chat(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), 9, noted, more)
        case "completion":
            body = decode_completion(json.dumps({"model": "m", "prompt": "x", **fields}).encode(), noted, more)
        case "responses":
            body = decode_responses(json.dumps({"model": "m", "input": "x", **fields}).encode(), 9, noted, more)
        case _:
            raw = json.dumps({"model": "m", "max_tokens": 1, "messages": MESSAGES, **fields}).encode()
            body = decode_messages(raw, 9, noted, more)
    return body, noted.fields


APIS = ["chat", "completion", "responses", "messages"]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "name",
    [
        "x_client_version",
        "internal_chat_message_metadata_passthrough",
        "litellm_trace_id",
        "provider",
        "rid",
        "user_id",
    ],
)
def test_hints_pass(api: str, name: str) -> None:
    """Clients, proxies and caches add what is none of the model's business, and their users cannot leave it out."""
    assert decode(api, {name: {"a": 1}})[1] == [name]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_what_asks_for_nothing_passes(api: str, value: Any) -> None:
    """Clients send the defaults of other servers."""
    for name in ("mirostat", "use_beam_search", "tool_resources"):
        decode(api, {name: value})


@pytest.mark.parametrize(
    ("api", "fields", "field", "hint"),
    [
        ("chat", {"temprature": 0.5}, "temprature", "temperature"),
        ("chat", {"maxTokens": 5}, "maxTokens", "max_tokens"),
        ("chat", {"max_output_tokens": 5}, "max_output_tokens", ""),
        ("chat", {"n_predict": 5}, "n_predict", "max_tokens"),
        ("chat", {"mesages": [1]}, "mesages", "messages"),
        (
            "chat",
            {"stream": True, "stream_options": {"include_usag": True}},
            "stream_options.include_usag",
            "include_usage",
        ),
        ("chat", {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ""),
        ("chat", {"dry_multiplier": 0.8}, "dry_multiplier", ""),
        ("chat", {"x" * 100 + "_sampler": 1}, "x" * 64 + "…", ""),
        ("completion", {"suffix": "x"}, "suffix", ""),
        ("completion", {"best_of": 3}, "best_of", ""),
        ("responses", {"max_tokens": 3}, "max_tokens", ""),
        ("responses", {"previous_response_id": "r"}, "previous_response_id", ""),
        ("messages", {"n": 2}, "n", ""),
        ("messages", {"stop": ["x"]}, "stop", ""),
        ("messages", {"mcp_servers": [1]}, "mcp_servers", ""),
    ],
)
def test_what_would_change_the_answer_is_refused(api: str, fields: dict[str, Any], field: str, hint: str) -> None:
    """To ignore it would silently be a wrong answer; a misspelt name is told the right one."""
    with pytest.raises(KvloomError) as caught:
        decode(api, fields)
    assert caught.value.field == field
    assert (f"Did you mean {hint}?" in caught.value.message) == bool(hint), caught.value.message


@pytest.mark.parametrize("api", APIS)
def test_strict_mode(api: str) -> None:
    """Developers want to know of every name that is not known."""
    with pytest.raises(KvloomError, match="rid is not a known parameter"):
        decode(api, {"rid": "x"}, {STRICT: "true"})
    decode(api, {"rid": None}, {STRICT: "true"})


def test_a_body_that_is_wrong_is_not_excused() -> None:
    """Its error is about the field that is wrong, not about those that were left out."""
    with pytest.raises(KvloomError) as caught:
        decode("chat", {"rid": "x", "temperature": "hot"})
    assert caught.value.field == "temperature"


def test_common_extensions_of_other_servers() -> None:
    """vLLM's and SGLang's work, or are without effect."""
    decode(
        "chat",
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "guided_json": None,
            "truncate_prompt_tokens": 10,
            "cache_salt": "x",
            "top_k": -1,
            "length_penalty": 1.2,
            "early_stopping": True,
            "separate_reasoning": True,
            "best_of": 1,
            "mm_processor_kwargs": {"a": 1},
            "chat_template_kwargs": {"enable_thinking": False, "builtin_tools": ["a"]},
        },
    )


async def test_the_operator_learns_of_them() -> None:
    """The names are the clients' own, so few of them get a series; and there is one line an hour."""
    counted: list[str] = []
    rules = UnknownFields(counted.append, refuses_all=False)
    with structlog.testing.capture_logs() as lines:
        rules.note(["rid", "a b"])
        rules.note(["rid"])
        rules.note([f"name_{number}" for number in range(2 * MAX_NAMES)])
    assert counted[:3] == ["rid", "other", "rid"]
    assert len(set(counted)) == MAX_NAMES + 1
    assert [line["fields"] for line in lines] == [{"rid": 1, "other": 1}]
    assert asyncio.get_running_loop().time() < rules._next_line_at


@pytest.mark.parametrize(
    ("refuses_all", "header", "strict"),
    [(False, None, False), (True, None, True), (False, "true", True), (True, "false", False), (False, "on", False)],
)
def test_who_is_strict(refuses_all: bool, header: str | None, strict: bool) -> None:
    """The header has precedence over the configuration."""
    rules = UnknownFields(lambda _: None, refuses_all=refuses_all)
    assert rules.is_strict({} if header is None else {STRICT: header}) == strict
