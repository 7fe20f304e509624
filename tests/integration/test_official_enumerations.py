"""Values of fields that OpenAI's and Anthropic's official clients may send, by their types."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest

from edge_http.anthropic.requests import decode_messages
from edge_http.openai.requests import ReasoningEffort, ServiceTier, decode_chat
from edge_http.openai.responses.requests import decode_responses

pytestmark = pytest.mark.xdist_group("anthropic")  # which takes seconds to import

MESSAGES = [{"role": "user", "content": "hi"}]


def test_enumerations_are_those_of_the_official_clients() -> None:
    """Whatever value their types allow is accepted by both APIs."""
    import anthropic.types
    import openai.types.shared_params
    from anthropic.types import message_create_params as messages
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    efforts = {value for value in get_args(get_args(openai.types.shared_params.ReasoningEffort)[0]) if value}
    assert efforts <= set(get_args(ReasoningEffort))
    for params in (chat.CompletionCreateParamsNonStreaming, responses.ResponseCreateParamsNonStreaming):
        tiers = _literals(get_type_hints(params)["service_tier"])
        assert "flex" in tiers
        assert tiers <= set(get_args(ServiceTier))
    verbosities = _literals(get_type_hints(chat.CompletionCreateParamsNonStreaming)["verbosity"])
    tiers = _literals(get_type_hints(messages.MessageCreateParamsNonStreaming)["service_tier"])
    efforts = _literals(get_type_hints(anthropic.types.OutputConfigParam)["effort"])
    assert verbosities
    assert tiers
    assert efforts
    for verbosity in verbosities:
        decode_chat(json.dumps({"model": "m", "messages": MESSAGES, "verbosity": verbosity}).encode(), 9)
        decode_responses(json.dumps({"model": "m", "input": "x", "text": {"verbosity": verbosity}}).encode(), 9)
    for tier in tiers:
        _decode_messages(service_tier=tier)
    for effort in efforts:
        _decode_messages(output_config={"effort": effort})


def _decode_messages(**fields: Any) -> None:
    raw = json.dumps({"model": "m", "max_tokens": 1, "messages": MESSAGES, **fields}).encode()
    decode_messages(raw, 9)


def _literals(annotation: Any) -> set[str]:
    """The texts that a type allows."""
    found: set[str] = set()
    waiting = [annotation]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            found.add(each)
        else:
            waiting += get_args(each)
    return found
