"""The names of a model that is being unloaded lead to its successor, without a rollout that says so."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable

import pytest

from kvloom.errors import KvloomError
from kvloom.v1.error_reason_pb2 import ErrorReason
from kvloom.v1.router_service_pb2 import FleetState, ModelInfo
from kvloom_common.discovery.records import RolloutRecord
from kvloom_common.models.catalogue import Catalogue
from kvloom_common.models.model_routes import ModelRoutes, RouteFacts
from kvloom_common.models.succession import SuccessionFollower, error_to_report, fallback_models
from kvloom_common.process.watched_files import following
from tests.fakes.served_models import tiny_model
from tests.waiting import eventually

GONE = KvloomError(ErrorReason.ERROR_REASON_MODEL_NOT_FOUND, "withdrawn")
FULL = KvloomError(ErrorReason.ERROR_REASON_QUEUE_FULL, "full")
FACTS = RouteFacts(1, frozenset(), is_batch=False, share_key="x")


@dataclasses.dataclass
class Routers:
    fleet: FleetState = dataclasses.field(default_factory=FleetState)
    changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def wait_fleet_change(self) -> None:
        await self.changed.wait()

    def report(self, withdrawn: Iterable[str]) -> None:
        infos = [ModelInfo(name=name, withdrawn=name in withdrawn) for name in ("m", "m@2")]
        self.fleet = FleetState(models=infos)
        self.changed.set()
        self.changed = asyncio.Event()


def catalogue() -> Catalogue:
    old = dataclasses.replace(tiny_model("m"), aliases=("chat",))
    new = dataclasses.replace(tiny_model("m@2"), aliases=("m", "chat"), succeeds="m")
    return Catalogue([old, new])


async def test_the_successor_takes_over_when_the_old_version_is_withdrawn_and_only_then() -> None:
    """An edge that cannot reach the registry has forgotten the rollout: its users got 404 until the last answer of the
    old version had ended."""
    routers, routes, models = Routers(), ModelRoutes(), catalogue()
    async with following(SuccessionFollower(models, routes, routers)):
        routers.report(())
        assert not routes.by_name
        routers.report({"m"})
        await eventually(lambda: set(routes.by_name) == {"m", "chat"})
        assert [list(routes.choose(name, (), FACTS, ()).models) for name in ("m", "chat", "m@2")] == [["m@2"]] * 3
        assert routes.choose("m", (), FACTS, ()).how == "m;target=m@2"
        routers.report({"m", "m@2"})  # the whole model goes
        await eventually(lambda: not routes.by_name)


async def test_a_card_that_comes_late_is_noticed() -> None:
    """An edge that has just started fetches the cards one after another."""
    routers, routes, models = Routers(), ModelRoutes(), Catalogue([tiny_model("m")])
    async with following(SuccessionFollower(models, routes, routers)):
        routers.report({"m"})
        models.add(dataclasses.replace(tiny_model("m@2"), aliases=("m",), succeeds="m"))
        await eventually(lambda: set(routes.by_name) == {"m"})


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_withdrawal_has_precedence_over_what_is_known_of_the_rollout(share: float) -> None:
    """A process that cannot reach the registry has missed the last step: a part of the sessions got 404. A rollback
    withdraws the new version, whose names are the old one's already."""
    routes, models = ModelRoutes(), catalogue()
    routes.follow_rollouts([RolloutRecord("m", ("m", "chat"), "m", "m@2", share, "a", "i")])
    routes.follow_successors(models.successors({"m"}))
    assert routes.choose("m", (), FACTS, ()).models[0] == "m@2"
    routes.follow_successors(models.successors({"m@2"}))
    assert routes.choose("m", (), FACTS, ()).models[0] == ("m@2" if share == 1.0 else "m")


def test_an_heir_takes_only_what_was_refused_as_withdrawn_and_once() -> None:
    """The new version must not get the old one's requests because that one is busy, and a refusal by both must end."""
    models = catalogue().by_name
    assert list(fallback_models([("m", GONE)], models)) == list(fallback_models([("chat", GONE)], models)) == ["m@2"]
    assert not list(fallback_models([("m", FULL)], models))
    assert not list(fallback_models([("m", GONE), ("m@2", GONE)], models))
    assert not list(fallback_models([("unknown", GONE)], models))
    passed = [("m", GONE)]
    passed.extend((heir, GONE) for heir in fallback_models(passed, models))
    assert [name for name, _ in passed] == ["m", "m@2"]


def test_a_model_that_is_not_there_hides_no_error_of_one_that_is() -> None:
    """The client of a model whose new version has been taken back would be told that its model does not exist, and not
    try again, though the old version is only busy."""
    assert error_to_report([("m@2", GONE), ("m", FULL)]) is FULL
    assert error_to_report([("m@2", GONE), ("m", GONE)]) is GONE
