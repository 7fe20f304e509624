"""Which model a route chooses: by rule, by share, and what is tried after it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.config import ConfigError, RouteConfig, RouteRule, RouteTarget
from kvloom.models.model_routes import MAX_CANDIDATES, ModelRoutes, RouteFacts

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
