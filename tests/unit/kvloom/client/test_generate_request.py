"""Options that the SDK rejects before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

import kvloom
from kvloom.client.generate_request import build_request
from kvloom.errors import KvloomError
from kvloom.v1 import router_service_pb2
from kvloom.v1.generation_pb2 import Choices, Guide


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "messages"),
        ({"text": "a", "token_ids": [1]}, "messages"),
        ({"text": 5}, "text"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"text": "a", "tier": "urgent"}, "tier"),
        ({"token_ids": ["a"]}, "token_ids"),
        ({"token_ids": [2**32]}, "token_ids"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": 4}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"text": "a", "tools": [{"name": "f"}]}, "tools"),
        ({"token_ids": [1], "template_options": {"a": 1}}, "template_options"),
        ({"messages": [], "tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"messages": [], "tools": [{"name": "f"}, 5]}, "tools[1]"),
        ({"messages": [], "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"messages": [], "tools": [{"function": {"name": "f", "parameters": 5}}]}, "tools[0].parameters"),
        ({"messages": [], "tool_choice": "maybe"}, "tool_choice"),
        ({"messages": [], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": [], "template_options": {"a": {1}}}, "template_options"),
        ({"text": "a", "max_tokens": -1}, "max_tokens"),
        ({"text": "a", "max_tokens": 0}, "max_tokens"),
        ({"text": "a", "temperature": 3.0}, "temperature"),
        ({"text": "a", "temperature": "hot"}, "temperature"),
        ({"text": "a", "top_p": -0.1}, "top_p"),
        ({"text": "a", "logprobs": 21}, "logprobs"),
        ({"text": "a", "stop": ["x"] * 17}, "stop"),
        ({"text": "a", "stop": [""]}, "stop[0]"),
        ({"text": "a", "stop": 5}, "stop"),
        ({"text": "a", "n": 0}, "n"),
        ({"text": "a", "n": 17}, "n"),
        ({"text": "a", "seed": 2**64}, "seed"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], field: str) -> None:
    """The error names the option at fault as the SDK calls it."""
    with pytest.raises(KvloomError) as caught:
        build_request({"model": "m", **options})
    assert caught.value.field == field


def test_an_unknown_option_is_a_type_error() -> None:
    """Like any Python function. To ignore a misspelt option silently would be worse."""
    with pytest.raises(TypeError, match=r"max_token\. Did you mean max_tokens\?"):
        build_request({"model": "m", "text": "a", "max_token": 3})


def test_a_tier_is_sent_along() -> None:
    """A request that can wait has the tier "batch"."""
    assert build_request({"model": "m", "text": "a", "tier": "batch"}).tier == router_service_pb2.TIER_BATCH


def test_a_prompts_log_probabilities_are_asked_for_from_a_start_on() -> None:
    """Both numbers are sampling parameters, of which a forgotten one would have no effect."""
    sampling = build_request(
        {"model": "m", "token_ids": [1, 2], "prompt_logprobs": 0, "prompt_logprobs_start": 1}
    ).sampling
    assert (sampling.HasField("prompt_logprobs"), sampling.prompt_logprobs_start) == (True, 1)


def test_options_that_are_none_count_as_not_given() -> None:
    """Callers pass on their own optional parameters, which may be None."""
    request = build_request({"model": "m", "text": "a", "seed": None, "stop": None})
    assert not request.sampling.HasField("seed")


def test_an_empty_list_of_token_ids_is_an_input() -> None:
    """The router, not the SDK, rejects an empty prompt."""
    assert build_request({"model": "m", "token_ids": []}).WhichOneof("input") == "token_ids"


def test_the_package_names_its_public_things_and_no_others() -> None:
    """`kvloom.Client` works without importing submodules; typos fail as usual."""
    assert kvloom.Client.__name__ == "Client"
    assert kvloom.Delta(0).text == ""
    with pytest.raises(AttributeError):
        _ = kvloom.Clinet


@pytest.mark.parametrize(
    ("form", "guide"),
    [
        ({"json_object": True}, Guide(json_object=True)),
        ({"json_schema": {"type": "null"}}, Guide(json_schema='{"type": "null"}')),
        ({"json_schema": '{"type": "null"}'}, Guide(json_schema='{"type": "null"}')),
        ({"regex": "a+"}, Guide(regex="a+")),
        ({"choice": ["a", "b"]}, Guide(choice=Choices(texts=["a", "b"]))),
        ({"grammar": 'start: "a"'}, Guide(grammar='start: "a"')),
    ],
)
def test_every_form_of_guide_can_be_asked_for(form: dict[str, Any], guide: Guide) -> None:
    """Callers write plain Python."""
    assert build_request({"model": "m", "text": "x", "guide": form}).sampling.guide == guide


@pytest.mark.parametrize(
    "form", [{}, {"regex": "a", "choice": ["b"]}, {"yaml": "x"}, {"regex": 3}, {"choice": [1]}, {"regex": ""}]
)
def test_an_unusable_guide_is_named(form: dict[str, Any]) -> None:
    """The guide is rejected before the request is sent."""
    with pytest.raises(KvloomError) as caught:
        build_request({"model": "m", "text": "x", "guide": form})
    assert caught.value.field == "guide"


def test_what_earlier_messages_hold_is_no_error() -> None:
    """A conversation that came from another service continues here."""
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}, {"id": "c"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning": "hm", "annotations": []},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
    ]
    sent = build_request({"model": "m", "messages": messages}).conversation.messages
    assert [message.content for message in sent] == ["a[image left out: this model reads text only]", "", "No.", "b"]
    assert [(call.id, call.name, call.arguments) for call in sent[1].tool_calls] == [
        ("", "f", '{"a": 1}'),
        ("c", "", ""),
    ]
    assert sent[2].reasoning == "hm"


def test_values_that_mean_all_tokens_or_the_likeliest() -> None:
    """As callers of other servers say it."""
    sampling = build_request({"model": "m", "text": "a", "top_k": -1, "top_p": 0.0}).sampling
    assert (sampling.top_k, sampling.top_p) == (0, 0.0)
