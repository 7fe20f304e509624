"""Which model a route chooses: by rule, by share, and what is tried after it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.errors import KvloomError
from kvloom_common.config import ConfigError, RouteConfig, RouteRule, RouteTarget
from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.models.model_routes import MAX_CANDIDATES, ModelRoutes, RouteFacts, models_of

SERVED = ("large", "small")


def facts(**changes: Any) -> RouteFacts:
    given: dict[str, Any] = {"num_prompt_tokens": 10, "features": frozenset(), "is_batch": False, "share_key": "a"}
    return RouteFacts(**(given | changes))


def split(canary_weight: float) -> ModelRoutes:
    stable = RouteTarget(model="stable", weight=100 - canary_weight)
    return ModelRoutes([RouteConfig(name="m", targets=[stable, RouteTarget(model="canary", weight=canary_weight)])])


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({}, "small"),
        ({"features": frozenset({"tools"})}, "large"),
        ({"features": frozenset({"logprobs", "tools"})}, "large"),
        ({"is_batch": True}, "cheap"),
        ({"num_prompt_tokens": 100}, "small"),
        ({"num_prompt_tokens": 101}, "long"),
    ],
)
def test_the_first_rule_that_holds_decides(changes: dict[str, Any], model: str) -> None:
    """An operator reads rules from top to bottom."""
    rules = [
        RouteRule(features=["tools"], targets=["large"]),
        RouteRule(tiers=["batch"], targets=["cheap"]),
        RouteRule(min_prompt_tokens=101, targets=["long"]),
    ]
    routes = ModelRoutes([RouteConfig(name="any", rules=rules, targets=["small"], fallback=["large"])])
    chosen = routes.choose("any", (), facts(**changes), SERVED)
    assert chosen.models[0] == model
    assert chosen.models[-1] == "large"
    assert f"target={model}" in chosen.how


def test_shares_are_kept_within_two_percent() -> None:
    """A canary of 10% must get a tenth of the sessions."""
    routes = split(10)
    counts = Counter(routes.choose("m", (), facts(share_key=f"session-{i}"), SERVED).models[0] for i in range(10_000))
    assert 800 <= counts["canary"] <= 1200


@given(st.text(max_size=20), st.floats(1, 98), st.floats(0.1, 1))
def test_a_session_stays_where_it_is_while_the_last_share_grows(key: str, weight: float, more: float) -> None:
    """A rollout must not move a session to the new version and back."""
    before = split(weight).choose("m", (), facts(share_key=key), SERVED).models[0]
    after = split(weight + more).choose("m", (), facts(share_key=key), SERVED).models[0]
    assert (before, after) != ("canary", "stable")


def test_listed_models_and_routes_are_tried_in_their_order_and_once() -> None:
    """OpenRouter's `models`: each is another chance, and none is a second one of the same."""
    routes = ModelRoutes([RouteConfig(name="r", targets=["b"], fallback=["c", "a"])])
    assert routes.choose("a", ["r", "b", "d"], facts(), SERVED).models == ["a", "b", "c", "d"]
    many = [f"m{i}" for i in range(20)]
    assert len(routes.choose("a", many, facts(), SERVED).models) == MAX_CANDIDATES


def test_auto_stands_for_every_model_unless_it_is_one() -> None:
    """A client that does not care which model answers need not know their names."""
    routes = ModelRoutes()
    assert routes.is_needed("auto", None, SERVED)
    assert routes.choose("auto", (), facts(), SERVED).models == ["large", "small"]
    assert not routes.is_needed("auto", None, {"auto"})


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([RouteConfig(name="r", targets=["s"]), RouteConfig(name="s", targets=["r"])], "which is a route"),
        ([RouteConfig(name="r", targets=["m"], fallback=["s"]), RouteConfig(name="s", targets=["m"])], "'s'"),
        ([RouteConfig(name="r", targets=["m"]), RouteConfig(name="r", targets=["m"])], "two have the name 'r'"),
    ],
)
def test_routes_cannot_lead_in_a_circle(routes: list[RouteConfig], message: str) -> None:
    """It is refused when the configuration is read, not when a request comes."""
    with pytest.raises(ConfigError, match=message):
        ModelRoutes(routes)


def test_a_route_of_a_models_name_leads_to_the_model_itself() -> None:
    """So a canary needs no new name on the clients' side."""
    routes = ModelRoutes([RouteConfig(name="m", targets=["m"], fallback=["m2"])])
    assert routes.choose("m", (), facts(), ["m", "m2"]).models == ["m", "m2"]


@pytest.mark.parametrize(
    ("name", "more", "field"),
    [
        ("one", [], ""),
        ("a", ["b", "one"], ""),
        ("auto", [], "model"),
        ("two", [], "model"),
        ("ruled", [], "model"),
        ("a", ["b", "two"], "models[1]"),
    ],
)
def test_a_route_may_embed_only_with_one_model(name: str, more: list[str], field: str) -> None:
    """Vectors of two models would be stored side by side, and their distances mean nothing. An alias is no second
    model, and what a client lists by itself it may have."""
    routes = ModelRoutes(
        [
            RouteConfig(name="one", targets=["a"], fallback=["alias-of-a"]),
            RouteConfig(name="two", targets=["a"], fallback=["b"]),
            RouteConfig(name="ruled", rules=[RouteRule(tiers=["batch"], targets=["b"])], targets=["a"]),
        ]
    )

    def check() -> None:
        routes.check_comparable(name, more, ["a", "b"], lambda name: name.removeprefix("alias-of-"))

    if not field:
        check()
        return
    with pytest.raises(KvloomError, match=r"several models \(a, b\)") as caught:
        check()
    assert caught.value.field == field


def test_any_model_that_embeds_is_allowed_if_there_is_one() -> None:
    """A client of a fabric with one encoder need not know its name."""
    ModelRoutes().check_comparable("auto", [], ["a"], lambda name: name)


def test_rollouts_share_answers_only() -> None:
    """Vectors of the old and the new version must not be mixed, not even by a session."""
    routes = ModelRoutes([RouteConfig(name="r", targets=["m"])])
    routes.follow_rollouts([RolloutRecord("m", ("m",), "m", "m@2", 1.0, "a", "i")])
    assert routes.is_needed("m", None, SERVED)
    assert not routes.is_needed("m", None, SERVED, is_answer=False)
    assert routes.choose("r", (), facts(), SERVED).models[0] == "m@2"
    assert routes.choose("r", (), facts(is_answer=False), SERVED).models == ["m"]


NAMES = st.sampled_from("abcdef")


@st.composite
def some_routes(draw: st.DrawFn) -> list[RouteConfig]:
    """Two, of which each has another model to continue with."""
    routes: list[RouteConfig] = []
    for name in ("r", "s"):
        fallback = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
        target = draw(NAMES.filter(lambda model, known=fallback: [model] != known))
        continues = draw(st.booleans())
        on_loss = "continue" if continues else "fail"
        routes.append(RouteConfig(name=name, targets=[target], fallback=fallback, on_loss=on_loss))
    return routes


@given(some_routes(), st.lists(st.sampled_from("abcdefrs"), max_size=6))
def test_a_lost_answer_goes_through_each_model_of_one_route_once(routes: list[RouteConfig], more: list[str]) -> None:
    """However many models are lost one after the other, none is asked again, and none of which the route says
    nothing."""
    chosen = ModelRoutes(routes).choose("r", more, facts(), SERVED)
    by_name = {route.name: route for route in routes}
    for position, model in enumerate(chosen.models):
        successors = chosen.successors(model)
        positions = [chosen.models.index(other) for other in successors]
        assert positions == sorted(set(positions))
        assert all(each > position for each in positions)
        if model not in chosen.continued:
            assert not successors
            continue
        route = by_name[chosen.continued[model]]
        assert route.on_loss == "continue"
        assert {model, *successors} <= {*models_of(route)}
        for number, other in enumerate(successors, 1):  # the next loss goes on where this one is
            assert list(chosen.successors(other)) == list(successors[number:])


def test_answers_fail_unless_a_route_says_otherwise() -> None:
    """Nobody gets the beginning of one model's answer and the end of another's without having chosen it."""
    plain = ModelRoutes([RouteConfig(name="r", targets=["a"], fallback=["b"])])
    assert not plain.choose("r", ["c"], facts(), SERVED).successors("a")
    routes = ModelRoutes([RouteConfig(name="r", targets=["a"], fallback=["b"], on_loss="continue")])
    chosen = routes.choose("r", ["c"], facts(), SERVED)
    assert [chosen.successors(model) for model in "abc"] == [["b"], [], ()]


def test_a_version_that_is_being_rolled_out_continues_with_the_old_one() -> None:
    """It is what its requests fall back to before they have begun."""
    routes = ModelRoutes([RouteConfig(name="r", targets=["m"], fallback=["b"], on_loss="continue")])
    routes.follow_rollouts([RolloutRecord("m", ("m",), "m", "m@2", 0.9, "a", "i")])
    chosen = routes.choose("r", (), facts(share_key="s"), SERVED)
    assert chosen.models == ["m@2", "m", "b"]
    assert chosen.successors("m@2") == ["m", "b"]


def test_a_route_with_one_model_has_none_to_continue_with() -> None:
    """It is refused when the configuration is read, not in the outage for which it was written."""
    with pytest.raises(ConfigError, match="on_loss and one model"):
        ModelRoutes([RouteConfig(name="r", targets=["a"], on_loss="continue")])
