"""Which answers a cascade discards."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.config import CascadeConfig, ConfigError, RouteConfig, RouteRule
from kvloom_common.json_schema.schema_check import conforms
from kvloom_common.models.cascade import ANY_JSON, AnswerForm, CandidateChoice, is_refusal, objection
from kvloom_common.models.model_routes import MAX_CANDIDATES, ModelRoutes, RouteFacts

ALL = CascadeConfig(escalate_on=["schema", "logprob", "refusal"])
FREE = AnswerForm()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
PERSONS = AnswerForm(schema=PERSON, is_guided=True)
TOOLS = AnswerForm(
    tools={"weather": {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}}
)
FACTS = RouteFacts(10, frozenset(), is_batch=False, share_key="")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("choice", "form", "found"),
    [
        (CandidateChoice("Paris."), FREE, None),
        (CandidateChoice("I'm sorry, but I can't help with that."), FREE, "refusal"),
        (CandidateChoice("Paris", finish_reason="content_filter"), FREE, "refusal"),
        (CandidateChoice("Once upon", finish_reason="length"), FREE, None),
        (CandidateChoice('{"name": "Ann", "age": 3}'), PERSONS, None),
        (CandidateChoice('{"name": "Ann", "age": -3}'), PERSONS, "schema"),
        (CandidateChoice('{"name": "Ann", "shoe": 3}'), PERSONS, "schema"),
        (CandidateChoice('{"name": NaN}'), PERSONS, "schema"),
        (CandidateChoice("Ann"), PERSONS, "schema"),
        (CandidateChoice('{"name": "Ann"}', finish_reason="length"), PERSONS, "schema"),
        (CandidateChoice("[1]"), AnswerForm(schema=ANY_JSON, is_guided=True), "schema"),
        (CandidateChoice("red"), AnswerForm(choices=["red", "blue"], is_guided=True), None),
        (CandidateChoice("green"), AnswerForm(choices=["red", "blue"], is_guided=True), "schema"),
        (CandidateChoice("Sunny."), TOOLS, None),
        (CandidateChoice(calls=[("weather", '{"city": "Rome"}')], finish_reason="tool_calls"), TOOLS, None),
        (CandidateChoice(calls=[("weather", "{}")]), TOOLS, "schema"),
        (CandidateChoice(calls=[("weather", '{"city": ')]), TOOLS, "schema"),
        (CandidateChoice(calls=[("weather", '{"city": "Rome"}'), ("rain", "{}")]), TOOLS, "schema"),
        (CandidateChoice(calls=[("weather", '{"city": "Rome"}')], finish_reason="length"), TOOLS, "schema"),
        (CandidateChoice("yes", sum_logprobs=-2.0, num_logprobs=2), FREE, None),
        (CandidateChoice("yes", sum_logprobs=-2.1, num_logprobs=2), FREE, "logprob"),
        (CandidateChoice(""), FREE, None),
    ],
)
def test_each_test_says_what_it_objects_to(choice: CandidateChoice, form: AnswerForm, found: str | None) -> None:
    """Operators name tests, so each must mean what the documentation says."""
    assert objection([choice], ALL, form) == found


def test_every_choice_must_pass_and_the_first_test_is_named() -> None:
    """With n > 1 the client would get the bad choice, too."""
    bad = CandidateChoice("Sorry, I can't.", sum_logprobs=-9.0, num_logprobs=3)
    assert objection([CandidateChoice("Paris"), bad], ALL, FREE) == "logprob"
    assert objection([bad], CascadeConfig(escalate_on=["refusal", "logprob"]), FREE) == "refusal"
    assert objection([bad], CascadeConfig(escalate_on=["schema"]), FREE) is None


@given(st.floats(-50, 0), st.floats(-50, 0), st.integers(1, 100), st.floats(-50, 0))
def test_a_surer_answer_is_never_discarded_where_a_less_sure_one_is_kept(
    one: float, other: float, num_tokens: int, least: float
) -> None:
    """The threshold is a threshold."""
    tests = CascadeConfig(escalate_on=["logprob"], min_mean_logprob=least)
    low, high = (
        CandidateChoice("a", sum_logprobs=mean * num_tokens, num_logprobs=num_tokens) for mean in sorted((one, other))
    )
    assert objection([low], tests, FREE) is not None or objection([high], tests, FREE) is None


@given(st.text(max_size=400), st.text(max_size=40))
def test_any_answer_is_judged(text: str, arguments: str) -> None:
    """What a model writes may be anything, and an error here would be an error of the request."""
    for form in (FREE, PERSONS, TOOLS):
        objection([CandidateChoice(text, calls=[("weather", arguments)])], ALL, form)
        objection([CandidateChoice(text)], ALL, form)


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't assist with that request.",
        "I’m sorry, I cannot help you with that.",
        "**I cannot provide instructions for that.**",
        "As an AI language model, I am unable to answer this question.",
        "Unfortunately, I can't do this for you.",
        "I must decline to do that.",
        "Es tut mir leid, aber dabei kann ich nicht helfen.",
        "Leider kann ich Ihnen das nicht sagen.",
        "Je suis désolé, mais je ne peux pas répondre à cette question.",
        "Lo siento, pero no puedo ayudarte con eso.",
    ],
)
def test_refusals_are_recognised(text: str) -> None:
    """A larger model may know the answer."""
    assert is_refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sorry for the delay! The answer is 42.",
        "I'm sorry for your loss. Losing a friend is hard.",
        "I can't wait to tell you: it is Paris.",
        "I cannot see any error in this code; it is right.",
        "He said: \"I'm sorry, but I can't help with that.\"",
        "The model answers: I cannot help with that.",
        "You can't divide by zero, so the result is undefined.",
        "Unfortunately, the file does not exist.",
        "Ich kann das gut verstehen. Hier ist die Lösung.",
        "Leider war das Wetter schlecht.",
        "No puedo esperar a contártelo: es París.",
    ],
)
def test_answers_are_no_refusals(text: str) -> None:
    """A good answer of the small model must not cost a second one."""
    assert not is_refusal(text)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": ["string", "null"]}, [None, "a"], [1, True]),
        ({"type": "integer"}, [1, 2.0], [1.5, True, "1"]),
        ({"enum": [1, "a"]}, [1, "a"], [True, "b"]),
        ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}]),
        ({"items": {"type": "string"}, "minItems": 1, "maxItems": 2}, [["a"]], [[], [1], ["a"] * 3]),
        ({"prefixItems": [{"type": "string"}], "items": False}, [["a"], []], [["a", 1], [1]]),
        ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, ["a", 3], [2]),
        ({"oneOf": [{"minimum": 3}, {"maximum": 5}]}, [2, 6], [4]),
        ({"not": {"type": "null"}}, [0], [None]),
        ({"maxLength": 2}, ["ab", 123], ["abc"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 2}, [1], [0, 2]),
        (
            {
                "$defs": {"tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}},
                "$ref": "#/$defs/tree",
            },
            [{}, {"next": {"next": {}}}],
            [{"next": {"next": 1}}, 1],
        ),
        ({"additionalProperties": {"type": "integer"}}, [{"a": 1}], [{"a": "b"}]),
        (False, [], [1]),
        ({"type": "strange", "properties": 3, "required": "x", "enum": 4, "$ref": "#/none"}, [1, {}], []),
    ],
)
def test_schemas_say_which_values_conform(schema: Any, good: list[Any], bad: list[Any]) -> None:
    """As the standard does; a malformed schema allows everything."""
    assert all(conforms(value, schema) for value in good)
    assert not any(conforms(value, schema) for value in bad)


@given(json_values, json_values)
def test_any_schema_is_read(value: Any, schema: Any) -> None:
    """The schema is a stranger's."""
    conforms(value, schema)
    assert conforms(value, {"const": value})


def test_a_schema_that_multiplies_its_work_is_bounded() -> None:
    """2^60 branches must not hold up the other streams."""
    schema = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    assert conforms({"x": 1}, schema)


def test_the_last_model_is_never_judged() -> None:
    """Its answer streams live: there is no other."""
    rules = [RouteRule(features=["tools"], targets=["large"])]
    routes = ModelRoutes([RouteConfig(name="r", targets=["s"], rules=rules, fallback=["m", "large"], cascade=ALL)])
    chosen = routes.choose("r", (), FACTS, ())
    assert (chosen.models, list(chosen.cascades), chosen.how) == (["s", "m", "large"], ["s", "m"], "r;target=s")
    tools = RouteFacts(10, frozenset({"tools"}), is_batch=False, share_key="")
    assert list(routes.choose("r", (), tools, ()).cascades) == ["large"]  # then m, and large is not tried twice
    assert list(routes.choose("s", ["r"], FACTS, ()).cascades) == ["m"]  # the client named s itself
    assert list(routes.choose("r", ["x"], FACTS, ()).cascades) == ["s", "m"]


@given(st.lists(st.sampled_from(["r", *"abcdefghijk"]), max_size=12))
def test_whatever_a_client_lists_the_last_model_answers_live(more: list[str]) -> None:
    """Otherwise a request could end with every answer discarded."""
    routes = ModelRoutes([RouteConfig(name="r", targets=["a"], fallback=list("bcdefgh"), cascade=ALL)])
    chosen = routes.choose("r", more, FACTS, ())
    assert len(chosen.models) == MAX_CANDIDATES
    assert chosen.models[-1] not in chosen.cascades


def test_a_cascade_needs_two_models() -> None:
    """It would never escalate."""
    with pytest.raises(ConfigError, match="cascade"):
        ModelRoutes([RouteConfig(name="r", targets=["a"], fallback=["a"], cascade=ALL)])


def test_numbers_that_no_float_holds_are_judged() -> None:
    """JSON allows 1e999, which Python reads as infinity."""
    assert not conforms(json.loads("1e999"), {"type": "number"})
