"""How requests are shared between two versions of a model while the new one is rolled out."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom_common.config import RouteConfig
from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.models.model_routes import NO_ROUTES, ModelRoutes, RouteFacts

SERVED = ("m", "m@2", "other")
CONFIGURED = [
    RouteConfig(name="auto", targets=["m"], fallback=["other"]),
    RouteConfig(name="spare", targets=["other"], fallback=["m"]),
]


def record(share: float) -> RolloutRecord:
    return RolloutRecord("m", ("m", "alias"), old="m", new="m@2", share=share, address="a", incarnation_id="i")


def routes(*shares: float, configured: list[RouteConfig] | None = None) -> ModelRoutes:
    found = ModelRoutes(configured or [])
    for share in shares:
        found.follow_rollouts([record(share)])
    return found


def chosen(found: ModelRoutes, name: str, key: str) -> list[str]:
    return list(found.choose(name, (), RouteFacts(10, frozenset(), False, key), SERVED).models)


@given(
    st.text(max_size=20), st.lists(st.floats(0, 1), min_size=2, max_size=6).map(sorted), st.sampled_from(["m", "alias"])
)
def test_a_session_moves_once_while_the_share_grows(key: str, shares: list[float], name: str) -> None:
    """A conversation must not change between two versions with every step."""
    found = [chosen(routes(share), name, key)[0] for share in shares]
    assert "m@2" not in found or set(found[found.index("m@2") :]) == {"m@2"}
    assert chosen(routes(1), name, key)[0] == "m@2"
    assert chosen(routes(0), name, key)[0] == "m"


@given(st.text(max_size=20), st.floats(0.001, 0.999))
def test_all_names_of_a_model_lead_to_the_same_version(key: str, share: float) -> None:
    """A user is on one version, however their requests name the model: also by a configured route."""
    found = routes(share, configured=CONFIGURED)
    version = chosen(found, "m", key)[0]
    assert chosen(found, "alias", key)[0] == version
    assert chosen(found, "auto", key)[0] == version
    assert chosen(found, "spare", key)[1] == version


def test_shares_are_kept_within_two_percent() -> None:
    """A step of 10% must expose a tenth of the sessions."""
    found = routes(0.1)
    counts = Counter(chosen(found, "m", f"session-{i}")[0] for i in range(10_000))
    assert 800 <= counts["m@2"] <= 1200


def test_requests_of_the_new_version_fall_back_to_the_old_one_and_not_the_other_way() -> None:
    """A user must not suffer from a version that is tried out, and an overload of the old version must not expose more
    users to the new one."""
    found = routes(0.5)
    lists = {tuple(chosen(found, "m", f"session-{i}")) for i in range(100)}
    assert lists == {("m",), ("m@2", "m")}
    assert chosen(routes(1.0), "m", "x") == ["m@2", "m"]


def test_a_version_can_be_named_and_auto_does_not_mean_the_new_one() -> None:
    """Who wants to try the new version asks for it. Who does not care gets no larger share of it than others."""
    found = routes(0.0)
    assert chosen(found, "m@2", "x") == ["m@2"]
    assert chosen(found, "auto", "x") == ["m", "other"]


def test_the_route_says_which_version_it_was() -> None:
    """Operators look for the version in the header x-kvloom-route."""
    facts = RouteFacts(10, frozenset(), False, "x")
    assert routes(1.0, configured=CONFIGURED).choose("auto", (), facts, SERVED).how == "auto;target=m;target=m@2"
    assert routes(1.0).choose("m", (), facts, SERVED).how == "m;target=m@2"
    assert routes(0.0).choose("m", (), facts, SERVED).how == "m"


def test_the_end_of_a_rollout_leaves_the_configured_routes() -> None:
    """Models without a rollout or a route must be found by one lookup."""
    found = routes(0.5, configured=CONFIGURED)
    assert set(found.by_name) == {"m", "alias", "auto", "spare"}
    found.follow_rollouts([])
    assert set(found.by_name) == {"auto", "spare"}
    assert chosen(found, "m", "x") == ["m"]
    assert not NO_ROUTES.by_name


@pytest.mark.parametrize("field", [{"share": 1.5}, {"names": []}, {"names": [""]}, {"new": "x" * 129}])
def test_a_record_that_makes_no_sense_is_none(field: dict[str, object]) -> None:
    """A registry may hold anything."""
    raw = msgspec.json.encode(msgspec.structs.asdict(record(0.5)) | field)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(raw, type=RolloutRecord)
